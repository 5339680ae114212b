"""Responses that are kept: the next one sends only what is new, and no other tenant finds them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from support.models.families import ADD, template_path
from support.servers.server import MODEL, Server, key_file, running

pytestmark = pytest.mark.full

PATH = "/v1/responses"
ANNA, BEN = "a-long-secret-of-anna", "a-long-secret-of-ben"
BODY: dict[str, Any] = {"max_output_tokens": 8, "temperature": 0, "store": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = key_file(tmp_path_factory.mktemp("keys"), f"anna:{ANNA}", f"ben:{BEN} sessions=1")
    with running("--n-ctx", "2048", "--api-key-file", str(keys)) as server:
        yield server


def create(server: Server, text: str, key: str = ANNA, **body: Any) -> Any:
    return server.post(PATH, {"input": text, **BODY, **body}, key=key)


def said(response: Any) -> str:
    return str(response["output"][0]["content"][0]["text"])


def test_the_next_one_is_what_the_whole_history_is(server: Server) -> None:
    turns: list[dict[str, str]] = []
    previous = None
    for i in range(4):
        text = f"The code of door {i} is {4000 + i}. Where is it?"
        turns.append({"role": "user", "content": text})
        response = create(server, text, previous_response_id=previous)
        assert (response["store"], response["previous_response_id"]) == (True, previous)
        whole = server.post(PATH, {**BODY, "store": False, "input": turns}, key=ANNA)
        assert said(whole) == said(response)
        assert whole["usage"]["input_tokens"] == response["usage"]["input_tokens"]
        if previous is not None:
            details = response["usage"]["input_tokens_details"]
            assert response["usage"]["input_tokens"] - details["cached_tokens"] < 40
        turns.append({"role": "assistant", "content": said(response)})
        previous = response["id"]


def test_a_client_and_a_stream(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key=ANNA)
    options: Any = {"model": MODEL, "max_output_tokens": 100, "temperature": 0, "store": True}
    with client.responses.stream(input="Where is the lamp?", **options) as stream:
        first = stream.get_final_response()
    turns: Any = [
        {"role": "user", "content": "Where is the lamp?"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And the key?"},
    ]
    then = client.responses.create(input="And the key?", previous_response_id=first.id, **options)
    whole = client.responses.create(input=turns, **{**options, "store": False})
    assert then.previous_response_id == first.id
    assert then.output_text == whole.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(input="And?", previous_response_id=first.id, **options)
    client.responses.create(input="And?", previous_response_id=then.id, **options)  # has it all


def test_a_history_with_a_message_that_says_nothing(server: Server) -> None:
    messages = [{"role": "user", "content": "Where?"}, {"role": "assistant"}]
    server.post("/v1/context", {"model": MODEL, "session_id": "resp_mine", "messages": messages}, key=ANNA)
    assert create(server, "hi", previous_response_id="resp_mine")["status"]


def test_two_go_on_from_one(server: Server) -> None:
    first = create(server, "The lamp lies in the mill.")
    a, b = (create(server, f"{what}?", previous_response_id=first["id"]) for what in ("Who", "Who"))
    assert a["id"] != b["id"]
    assert a["usage"]["input_tokens"] == b["usage"]["input_tokens"]


def test_instructions_are_not_kept(server: Server) -> None:
    first = create(server, "Hello", instructions="Answer in Latin. " * 8)
    plain = create(server, "Hello")
    turns = [create(server, "And?", previous_response_id=each["id"]) for each in (first, plain)]
    assert abs(turns[0]["usage"]["input_tokens"] - turns[1]["usage"]["input_tokens"]) <= 8


@pytest.mark.parametrize("key", [ANNA, BEN])
def test_what_is_not_kept_is_unknown(server: Server, key: str) -> None:
    kept = create(server, "Hello")["id"]
    not_kept = create(server, "Hello", store=False)["id"]
    server.post("/v1/context", {"model": MODEL, "session_id": "mine", "prompt": "Hello"}, key=ANNA)
    try:
        for unknown in ["resp_0123", "mine", not_kept, *([kept] if key == BEN else [])]:
            body = {"input": "And?", "previous_response_id": unknown}
            status, answer, _ = server.request("POST", PATH, body, key=key)
            assert (status, answer["error"]["code"]) == (404, "previous_response_not_found"), unknown
            assert answer["error"]["param"] == "previous_response_id"
    finally:
        server.request("DELETE", "/v1/context/mine", key=ANNA)
    status, _, _ = server.request("DELETE", f"{PATH}/{kept}", key=BEN)
    assert status == 404
    assert server.request("DELETE", f"{PATH}/resp-%20%00", key=ANNA)[0] == 400
    assert server.request("DELETE", f"{PATH}/{kept}", key=ANNA)[1]["deleted"] is True


def test_a_tenant_without_room_is_told_before_and_after(server: Server) -> None:
    held = create(server, "Hello", key=BEN)["id"]
    status, answer, _ = server.request("POST", PATH, {"input": "Hello", **BODY}, key=BEN)
    assert (status, answer["error"]["code"]) == (429, "session_quota")
    assert create(server, "Hello", key=BEN, store=False)["store"] is False
    server.request("DELETE", f"{PATH}/{held}", key=BEN)


def test_by_default_a_response_is_kept_in_place_of_the_oldest(server: Server) -> None:
    default = {name: value for name, value in BODY.items() if name != "store"}
    for key, n_kept in ((ANNA, 2), (BEN, 1)):
        made = [server.post(PATH, {"input": "Hello", **default}, key=key) for _ in range(2)]
        assert [each["store"] for each in made] == [True, True]
        found = [server.request("GET", f"{PATH}/{each['id']}", key=key)[0] for each in made]
        assert found == [200 if n_kept == 2 else 404, 200]
        for each in made[-n_kept:]:
            server.request("DELETE", f"{PATH}/{each['id']}", key=key)
    server.post("/v1/context", {"model": MODEL, "session_id": "all", "prompt": "Hello"}, key=BEN)
    without_room = server.post(PATH, {"input": "Hello", **default}, key=BEN)
    server.request("DELETE", "/v1/context/all", key=BEN)
    assert without_room["store"] is False
    assert server.request("GET", f"{PATH}/{without_room['id']}", key=BEN)[0] == 404


def test_calls_are_kept_and_all_outlives_a_kill(tmp_path: Path) -> None:
    template = str(template_path("Qwen-Qwen2.5-7B-Instruct"))
    tool = {"type": "function", "name": "add", "parameters": ADD["function"]["parameters"]}
    options = ["--n-ctx", "4096", "--chat-format", template, "--store", str(tmp_path)]
    with running(*options) as server:
        body = {"input": "What is 1 and 2?", "tools": [tool], "tool_choice": "required", "store": True}
        body = {**body, "temperature": 0, "parallel_tool_calls": False}
        first = server.events(PATH, body)[-1]["response"]
        (call,) = first["output"]
        server.wait_until_idle()
        server.stop(signal.SIGKILL)
    with running(*options) as server:
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
        then = {
            "input": [result],
            "previous_response_id": first["id"],
            "tools": [tool],
            "tool_choice": "none",
        }
        answer = server.post(PATH, {**then, "max_output_tokens": 4})
        usage = answer["usage"]
        assert usage["input_tokens"] > first["usage"]["input_tokens"]
        assert usage["input_tokens_details"]["cached_tokens"] >= first["usage"]["input_tokens"] - 8
        wrong = {**then, "input": [{**result, "call_id": "another"}]}
        assert server.status("POST", PATH, wrong) == 400
