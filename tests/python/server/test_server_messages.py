"""Message ids of a chat: which entry holds a message, and its KV deleted by id, by its own tenant only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mixedkv.bundled.corpus import make_recall
from mixedkv.cli.main import main
from support.servers.server import MODEL, Server, key_file, running

pytestmark = pytest.mark.full

ANNA, BEN = "0123456789abcdef-anna", "0123456789abcdef-ben"
AT = "/v1/cache/messages"


def ask(server: Server, messages: list[dict[str, Any]], key: str = "", **options: Any) -> Any:
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 24, **options}
    answer = server.post("/v1/chat/completions", body, key=key)
    return answer["choices"][0]["message"], answer["usage"]


def conversation(number: int) -> list[dict[str, Any]]:
    """A journal and a question about it, each with an id."""
    found = [dict(message) for message in make_recall(number, 20).messages]
    for i, message in enumerate(found):
        message["message_id"] = f"msg-{number}-{i}"
    return found


def test_a_messages_kv_is_found_and_deleted_by_its_id(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "store"
    messages = conversation(1)
    with running("--store", str(folder)) as server:
        answer, usage = ask(server, messages)
        server.wait_until_idle()
        listed = server.request("GET", AT)[1]["data"]
        assert {each["message_id"] for each in listed} == {
            answer["message_id"],
            *(message["message_id"] for message in messages),
        }
        ends = {each["message_id"]: each["n_tokens"] for each in listed}
        in_order = [ends[message["message_id"]] for message in [*messages, answer]]
        assert in_order == sorted(in_order)
        assert in_order[-2] <= usage["prompt_tokens"] < in_order[-1] <= usage["total_tokens"]
        found = server.request("GET", f"{AT}/{answer['message_id']}")[1]["entries"][0]
        assert found["bytes"] > 0
        assert found["age_seconds"] < 600
        # the next turn names its answer too, since its messages have ids
        more = [
            *messages,
            answer,
            {"role": "user", "content": "Say that again, please.", "message_id": "msg-x"},
        ]
        again, usage = ask(server, more)
        assert usage["prompt_tokens_details"]["cached_tokens"] > ends[messages[-1]["message_id"]]
        server.wait_until_idle()
        # what was said last goes, with its answer; what came before stays
        assert server.request("DELETE", f"{AT}/msg-x")[1]["deleted"]
        assert server.status("GET", f"{AT}/msg-x") == 404
        assert server.status("GET", f"{AT}/{again['message_id']}") == 404
        assert server.status("GET", f"{AT}/{messages[0]['message_id']}") == 200
        # neither store nor context has the first message's rows any more
        assert server.status("DELETE", f"{AT}/{messages[0]['message_id']}") == 200
        assert ask(server, messages)[1]["prompt_tokens_details"]["cached_tokens"] == 0
        server.wait_until_idle()
        assert server.stop() == 0
    main(["cache", "ls", "--messages", "--store", str(folder)])
    assert f"  {messages[0]['message_id']}\n" in capsys.readouterr().out
    main(["cache", "rm", "--message", messages[0]["message_id"], "--store", str(folder)])
    assert not capsys.readouterr().out.startswith("0 ")
    main(["cache", "ls", "--messages", "--store", str(folder)])
    assert capsys.readouterr().out == "0 messages\n"


def test_tenants_see_no_message_of_each_other(tmp_path: Path, capsys: Any) -> None:
    keys = str(key_file(tmp_path, f"anna:{ANNA}", f"ben:{BEN}"))
    folder = tmp_path / "store"
    messages = conversation(2)
    name = messages[0]["message_id"]
    with running("--api-key-file", keys, "--store", str(folder)) as server:
        ask(server, messages, ANNA)
        server.wait_until_idle(ANNA)
        assert server.request("GET", AT, key=BEN)[1]["data"] == []
        unknown = server.request("GET", f"{AT}/{name}_", key=BEN)[1]["error"]
        for method in ("GET", "DELETE"):
            status, answer, _ = server.request(method, f"{AT}/{name}", key=BEN)
            assert status == 404
            assert answer["error"] == {**unknown, "message": unknown["message"].replace(f"{name}_", name)}
            assert server.status(method, f"{AT}/{name}", key="wrong") == 401
        ask(server, messages, BEN)  # the same ids, and the same text
        server.wait_until_idle(BEN)
        assert server.status("DELETE", f"{AT}/{name}", key=BEN) == 200
        assert server.status("GET", f"{AT}/{name}", key=ANNA) == 200
        assert server.status("GET", AT, key="wrong") == 401
        server.stop()
    main(["cache", "ls", "--messages", "--store", str(folder), "--tenant", "ben"])
    assert capsys.readouterr().out == "0 messages\n"
    assert main(["cache", "rm", "--message", name, "--store", str(folder), "--tenant", "ben"]) == 2
    assert "nothing was removed" in capsys.readouterr().err
    main(["cache", "rm", "--message", name, "--store", str(folder), "--tenant", "anna"])
    assert not capsys.readouterr().out.startswith("0 ")


def test_texts_are_warmed_by_an_option_and_by_a_request(tmp_path: Path) -> None:
    first, second = (" ".join(make_recall(seed, 8).journal) for seed in (5, 6))
    file = tmp_path / "warm.jsonl"
    file.write_text(json.dumps({"text": first}) + "\n")
    with running("--warm", str(file), "--n-ctx", "2048") as server:
        warmed = server.post("/v1/warm", {"text": second})["prompt_tokens"]
        for text, least in ((first, 40), (second, warmed)):
            body = {"prompt": f"{text} And", "max_tokens": 1}
            usage = server.post("/v1/completions", body)["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= least - 1
