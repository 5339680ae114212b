"""A server with a store: what was computed is found after a restart, by whom it belongs to only."""

from __future__ import annotations

import operator
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mixedkv.bundled.corpus import make_recall
from support.patience import PATIENCE
from support.servers.server import MODEL, Server, key_file, running

pytestmark = pytest.mark.core

ANNA, BEN = "0123456789abcdef-anna", "0123456789abcdef-ben"


def chat(
    server: Server, messages: list[dict[str, str]], key: str = "", **options: Any
) -> tuple[str, dict[str, Any]]:
    body = {"model": MODEL, "messages": messages, "temperature": 0, **options}
    answer = server.post("/v1/chat/completions", body, key=key)
    return answer["choices"][0]["message"]["content"], answer["usage"]


def turn(server: Server, messages: list[dict[str, str]], number: int) -> dict[str, Any]:
    """One more question in a conversation; its usage."""
    recall = make_recall(1000 + number, 8)
    messages.append({"role": "user", "content": f"{' '.join(recall.journal)} {recall.fact.question}"})
    text, usage = chat(server, messages)
    messages.append({"role": "assistant", "content": text})
    return usage


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("kv", ["mixed", pytest.param("q8_0", marks=pytest.mark.nightly)])
def test_a_conversation_goes_on_after_a_restart(tmp_path: Path, kv: str, number: int) -> None:
    options = ("--kv", kv, "--store", str(tmp_path / "store"))
    messages: list[dict[str, str]] = []
    totals, cached = [], []
    for start in (0, 3):
        with running(*options) as server:
            for i in range(start, start + 3):
                usage = turn(server, messages, i)
                totals.append(usage["total_tokens"])
                cached.append(usage["prompt_tokens_details"]["cached_tokens"])
                tier = usage["prompt_tokens_details"]["cached_tier"]
                assert tier == ("disk" if i == 3 else "context" if i else None)
                assert usage["prompt_tokens_details"]["cached_exact"]
            server.wait_until_idle()
            assert server.stop(number) == (0 if number == signal.SIGTERM else -number)
    assert cached[0] == 0
    assert cached[1:] == totals[:-1]  # everything but the new message


def compare(folder: Path, kv: str, n: int) -> dict[str, int]:
    """How many of n greedy answers are those of an evaluation alone: among 8 others, from a warmed journal,
    and from disk after the server was killed. Usage proves where each came from.
    """
    recalls = [make_recall(2000 + i, 12) for i in range(n)]
    options = ("--kv", kv, "--store", str(folder), "--n-ctx", "32768")
    texts: dict[str, list[str]] = {}

    def ask_all(server: Server, name: str, tier: str | None, workers: int = 1, **more: Any) -> None:
        with ThreadPoolExecutor(workers) as pool:
            ask = partial(chat, server, max_tokens=24, **more)
            answers = list(pool.map(lambda recall: ask([*recall.messages]), recalls))
        texts[name] = [text for text, _ in answers]
        assert {usage["prompt_tokens_details"]["cached_tier"] for _, usage in answers} == {tier}

    with running(*options, "--idle-prefixes", str(2 * n + 8)) as server:
        ask_all(server, "alone", None, use_kv_cache=False)
        ask_all(server, "among 8", None, workers=8, use_kv_cache=False)
        for recall in recalls:
            server.post("/v1/warm", {"messages": recall.messages[:2]})
        ask_all(server, "warm", "context")
        server.wait_until_idle()
        server.stop(signal.SIGKILL)
    with running(*options) as server:
        ask_all(server, "disk", "disk")
    alone = texts.pop("alone")
    return {name: sum(map(operator.eq, alone, others)) for name, others in texts.items()}


@pytest.mark.parametrize("kv", ["mixed", pytest.param("f16", marks=pytest.mark.nightly)])
def test_answers_are_the_same_alone_and_not_warm_and_from_disk(tmp_path: Path, kv: str) -> None:
    same = compare(tmp_path, kv, 20)
    assert min(same.values()) >= 19, same  # a near tie may fall otherwise when sums are rounded otherwise


def test_tenants_find_nothing_of_each_other(tmp_path: Path) -> None:
    keys = str(key_file(tmp_path, f"anna:{ANNA}", f"ben:{BEN}"))
    options = ("--api-key-file", keys, "--store", str(tmp_path / "store"))
    messages = [*make_recall(1, 20).messages]
    with running(*options) as server:
        _, usage = chat(server, messages, ANNA)
        follow_up = [*messages, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
        assert chat(server, follow_up, ANNA)[1]["prompt_tokens_details"]["cached_tokens"] > 0
        assert chat(server, follow_up, BEN)[1]["prompt_tokens_details"]["cached_tokens"] == 0
        made = server.post("/v1/context", {"model": MODEL, "prompt": "a b c", "ttl": 60}, key=ANNA)
        path = f"/v1/context/{made['session_id']}"
        assert server.status("GET", path, key=ANNA) == 200
        unknown = server.request("GET", path[:-1] + "_", key=BEN)[1]["error"]
        for method in ("GET", "DELETE"):
            status, answer, _ = server.request(method, path, key=BEN)
            assert status == 404
            assert answer["error"].keys() == unknown.keys()
            assert answer["error"]["code"] == unknown["code"]
        stats = server.stats(BEN)
        assert {entry["prompt_tokens"] for entry in stats["recent"]} == {usage["prompt_tokens"] + 8} or stats[
            "recent"
        ]
        assert len(stats["recent"]) == 1
        assert "anna" not in str(stats) + server.log
        for key in ("", "wrong", ANNA[:-1], ANNA + "x"):
            for method, where in (
                ("POST", "/v1/chat/completions"),
                ("GET", "/v1/models"),
                ("GET", "/v1/stats"),
            ):
                body = {"messages": messages} if method == "POST" else None
                assert server.status(method, where, body, key=key) == 401
        hers = [*make_recall(2, 20).messages]
        chat(server, hers, ANNA)
        assert server.stop() == 0
    follow_up = [
        *hers,
        {"role": "assistant", "content": make_recall(2, 20).fact.answer},
        {"role": "user", "content": "y"},
    ]
    with running(*options) as server:
        assert chat(server, follow_up, BEN)[1]["prompt_tokens_details"]["cached_tokens"] == 0
        assert chat(server, follow_up, ANNA)[1]["prompt_tokens_details"]["cached_tier"] == "disk"


def test_an_encrypted_store_is_read_with_its_key_only(tmp_path: Path) -> None:
    secrets = [tmp_path / "a.key", tmp_path / "b.key"]
    for i, path in enumerate(secrets):
        path.write_text(f"{i:064x}\n")
        path.chmod(0o600)
    messages: list[dict[str, str]] = []
    for tier in (None, "disk"):
        with running("--store", str(tmp_path / "store"), "--store-key-file", str(secrets[0])) as server:
            usage = turn(server, messages, len(messages))
            assert usage["prompt_tokens_details"]["cached_tier"] == tier
            server.wait_until_idle()
            assert server.stop() == 0
    for options in (["--store-key-file", str(secrets[1])], []):
        server = Server("--store", str(tmp_path / "store"), *options)
        assert server.process.wait(PATIENCE) != 0
        server.stop()
        assert "encrypted with" in server.log
