"""Servers that share a remote: a conversation goes on where the one that had it was killed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from mixedkv.bundled.corpus import make_recall
from support.patience import wait_for
from support.servers.remote import Line, free_port, redis_server
from support.servers.server import MODEL, Server, running

pytestmark = pytest.mark.full


def chat(server: Server, messages: list[dict[str, str]]) -> tuple[str, dict[str, Any]]:
    answer = server.post(
        "/v1/chat/completions", {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 16}
    )
    return answer["choices"][0]["message"]["content"], answer["usage"]


def say(messages: list[dict[str, str]], number: int) -> None:
    recall = make_recall(1000 + number, 8)
    messages.append({"role": "user", "content": f"{' '.join(recall.journal)} {recall.fact.question}"})


def until_sent(server: Server) -> None:
    wait_for(lambda: server.wait_until_idle()["store"]["remote"]["waiting"] == 0)


@pytest.mark.needs("redis")
def test_a_killed_servers_conversation_goes_on_at_another(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (_, port):
        key = tmp_path / "key"
        key.write_text("ab" * 32)
        key.chmod(0o600)
        options = ["--store-remote", f"redis://127.0.0.1:{port}/0?timeout=20", "--store-key-file", str(key)]
        messages: list[dict[str, str]] = []
        total = 0
        with running(*options, "--store", str(tmp_path / "a")) as server:
            for number in range(2):
                say(messages, number)
                text, usage = chat(server, messages)
                messages.append({"role": "assistant", "content": text})
                total = usage["total_tokens"]
            say(messages, 2)
            until_sent(server)
            server.stop(signal.SIGKILL)
        with running(*options, "--store", str(tmp_path / "b")) as other:
            text, usage = chat(other, messages)
            details = usage["prompt_tokens_details"]
            assert (details["cached_tier"], details["cached_exact"]) == ("remote", True)
            assert details["cached_tokens"] == total
            assert other.stats()["cache"]["hits_tokens"]["remote"] == total
    with running() as alone:
        assert chat(alone, messages)[0] == text


@pytest.mark.needs("redis")
@pytest.mark.nightly
def test_a_remote_that_falls_silent_fails_no_request(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (_, port):
        line = Line(port)
        with running("--store-remote", f"redis://127.0.0.1:{line.port}/0?timeout=0.2") as server:
            messages: list[dict[str, str]] = []
            for number in range(3):
                line.mode = "silent" if number else "open"
                say(messages, number)
                text, usage = chat(server, messages)
                messages.append({"role": "assistant", "content": text})
                assert usage["completion_tokens"] > 0
            assert server.stop() == 0  # nor does it wait for what cannot be sent
        line.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--store-remote", "ftp://x"], "'ftp' is not the URL of a remote: use redis://"),
        (["--store-key-file", "k"], "store-key-file is given without store or --store-remote"),
    ],
)
@pytest.mark.nightly
def test_a_wrong_remote_ends_the_start(options: list[str], message: str) -> None:
    with pytest.raises(RuntimeError, match=message), running(*options):
        pass


@pytest.mark.nightly
def test_a_server_starts_without_its_remote() -> None:
    with running("--store-remote", f"redis://127.0.0.1:{free_port()}/0") as server:
        assert "does not answer: the store goes without it" in server.log
        assert server.status("GET", "/health") == 200
        assert server.stats()["store"]["remote"]["up"] is False
