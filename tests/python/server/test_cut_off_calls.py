"""A call that was cut off is no call, through every door: at each token, by a stop string, in a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.models.families import template_path
from support.servers.server import Server, running

pytestmark = pytest.mark.full

ARGUMENTS = {
    "type": "object",
    "properties": {"path": {"enum": ["/of/old"]}},
    "required": ["path"],
    "additionalProperties": False,
}
WHOLE = {"path": "/of/old"}
TOOL = {"type": "function", "function": {"name": "delete", "parameters": ARGUMENTS}}
ASK = [{"role": "user", "content": "Delete the old notes."}]
MORE = {"temperature": 0, "seed": 1}


QWEN = "Qwen-Qwen2.5-7B-Instruct"


@pytest.fixture(scope="module", params=[QWEN, pytest.param("", marks=pytest.mark.nightly)])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """With a template that has calls, and with the model's own, which gets `generic_tools`."""
    template = ("--chat-format", str(template_path(request.param))) if request.param else ()
    with running("--n-ctx", "4096", *template) as server:
        yield server


@pytest.fixture(scope="module")
def n_tokens(server: Server) -> int:
    """Of the whole call."""
    answer = openai(server, 200)
    assert answer["finish_reason"] == "tool_calls"
    return int(answer["n"])


def openai(server: Server, n: int, stop: str | None = None, stream: bool = False) -> dict[str, Any]:
    """Why the answer ended, and the texts of calls' arguments, of which a client parses those it wants."""
    body = {
        "messages": ASK,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": n,
        "stream": stream,
        **MORE,
    }
    body |= {"stop": [stop]} if stop else {}
    if not stream:
        found = server.post("/v1/chat/completions", body)
        choice = found["choices"][0]
        calls = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", ())]
        n = found["usage"]["completion_tokens"]
        return {"finish_reason": choice["finish_reason"], "calls": calls, "n": n}
    texts: dict[int, str] = {}
    for chunk in events(server, "/v1/chat/completions", body):
        choice = chunk["choices"][0]
        for call in choice["delta"].get("tool_calls", ()):
            texts[call["index"]] = texts.get(call["index"], "") + call["function"]["arguments"]
    return {"finish_reason": choice["finish_reason"], "calls": [*texts.values()]}


def anthropic(server: Server, n: int, stop: str | None = None, stream: bool = False) -> dict[str, Any]:
    body = {
        "messages": ASK,
        "tools": [{"name": "delete", "input_schema": ARGUMENTS}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "max_tokens": n,
        "temperature": 0,
        "stream": stream,
        **({"stop_sequences": [stop]} if stop else {}),
    }
    if not stream:
        found = server.post("/v1/messages", body)
        calls = [block["input"] for block in found["content"] if block["type"] == "tool_use"]
        return {"reason": found["stop_reason"], "calls": calls}
    text, reason = "", ""
    for event in events(server, "/v1/messages", body):
        text += event.get("delta", {}).get("partial_json", "")
        reason = event.get("delta", {}).get("stop_reason") or reason
    return {"reason": reason, "text": text}


def ollama(server: Server, n: int, stop: str | None = None, stream: bool = False) -> dict[str, Any]:
    options: dict[str, Any] = {"num_predict": n, **MORE} | ({"stop": [stop]} if stop else {})
    body = {"messages": ASK, "tools": [TOOL], "tool_choice": "required", "stream": stream, "options": options}
    lines = events(server, "/api/chat", body) if stream else [server.post("/api/chat", body)]
    calls = [
        call["function"]["arguments"] for line in lines for call in line["message"].get("tool_calls", ())
    ]
    return {"reason": lines[-1]["done_reason"], "calls": calls}


def responses(server: Server, n: int, stream: bool = False) -> dict[str, Any]:
    tool = {"type": "function", "name": "delete", "parameters": ARGUMENTS}
    body = {
        "input": "Delete the old notes.",
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": n,
        "temperature": 0,
        "store": False,
        "stream": stream,
    }
    if stream:
        found = events(server, "/v1/responses", body)[-1]["response"]
    else:
        found = server.post("/v1/responses", body)
    calls = [item for item in found["output"] if item["type"] == "function_call"]
    return {
        "status": found["status"],
        "done": [call["arguments"] for call in calls if call["status"] == "completed"],
    }


def events(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = server.request("POST", path, body)[1]
    lines = text.splitlines() if isinstance(text, str) else [json.dumps(text)]
    lines = [line.removeprefix("data: ") for line in lines if line.startswith(("data: ", "{"))]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("step", [30, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_the_limit_of_tokens_cuts_off_is_none(
    server: Server, n_tokens: int, stream: bool, step: int
) -> None:
    n_complete, last = 0, n_tokens - 4  # where the arguments end
    for n in [*range(1, last, step), *range(last, n_tokens)]:
        at = openai(server, n, stream=stream)
        assert at["finish_reason"] == "length"
        complete = [text for text in at["calls"] if text.endswith("}")]
        n_complete += bool(complete)
        said = anthropic(server, n, stream=stream)
        assert said["reason"] == "max_tokens"
        called = ollama(server, n, stream=stream)
        assert called == {"reason": "length", "calls": [WHOLE] if complete else []}, n
        if not stream:
            assert said["calls"] == called["calls"]
        response = responses(server, n, stream=stream)
        assert response["status"] == "incomplete"
        assert all(json.loads(text) == WHOLE for text in response["done"])
    assert n_complete <= 16  # what follows the arguments: a brace and the end of the call, a character each


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ['"path"', "of"])
def test_a_call_that_a_stop_string_cuts_off_is_none(server: Server, stop: str, stream: bool) -> None:
    at = openai(server, 200, stop, stream)
    assert at["finish_reason"] == "length"
    assert not any(text.endswith("}") for text in at["calls"])
    assert ollama(server, 200, stop, stream) == {"reason": "length", "calls": []}
    said = anthropic(server, 200, stop, stream)
    assert said["reason"] == "max_tokens"
    assert not said.get("calls")
