"""Endpoints beside chat and completions: tokens, templates, Anthropic's messages, OpenAI's responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import openai
import pytest

from support.models.families import ADD, template_path
from support.patience import PATIENCE
from support.servers.server import MODEL, Server, running

pytestmark = pytest.mark.full

USER = {"role": "user", "content": "Will it rain in Oslo?"}
INPUT_SCHEMA = ADD["function"]["parameters"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--n-ctx", "8192") as server:
        yield server


@pytest.fixture(
    scope="module", params=["Qwen-Qwen2.5-7B-Instruct", pytest.param("", marks=pytest.mark.nightly)]
)
def tools(request: Any) -> Iterator[Server]:
    """A template with tools, and the bundled model's own, which has none."""
    options = ["--chat-format", str(template_path(request.param))] if request.param else []
    with running("--n-ctx", "8192", *options) as server:
        yield server


@pytest.fixture(scope="module")
def thinks() -> Iterator[Server]:
    template = str(template_path("llama-cpp-deepseek-r1"))
    with running("--n-ctx", "8192", "--chat-format", template) as server:
        yield server


def events(server: Server, path: str, body: Any) -> list[dict[str, Any]]:
    """Of a stream whose events have names."""
    text = server.post(path, {**body, "stream": True})
    blocks = [block.split("\n") for block in text.strip().split("\n\n") if not block.startswith(":")]
    found = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {each['type']}" for each in found]
    return found


# --- tokens and templates ---


def test_tokens_and_their_text(server: Server) -> None:
    said = "The code of the mill is 4817. Größe"
    tokens = server.post("/tokenize", {"content": said})["tokens"]
    assert server.post("/detokenize", {"tokens": tokens})["content"] == said
    pieces = server.post("/tokenize", {"content": said, "with_pieces": True})["tokens"]
    assert [piece["id"] for piece in pieces] == tokens
    text = b"".join(
        bytes(p["piece"]) if isinstance(p["piece"], list) else p["piece"].encode() for p in pieces
    )
    assert text.decode() == said


def test_control_tokens_are_read_only_where_that_is_wanted(server: Server) -> None:
    body = {"content": "<|user|>"}
    assert len(server.post("/tokenize", body)["tokens"]) == 1
    assert len(server.post("/tokenize", {**body, "parse_special": False})["tokens"]) > 1
    assert server.post("/detokenize", server.post("/tokenize", body))["content"] == "<|user|>"


def test_the_prompt_of_a_chat(server: Server, tools: Server) -> None:
    prompt = server.post("/apply-template", {"messages": [USER]})["prompt"]
    assert prompt.endswith("<|user|>Will it rain in Oslo?<|end|><|assistant|>")
    usage = server.post("/v1/chat/completions", {"messages": [USER], "max_tokens": 1})["usage"]
    tokens = server.post("/tokenize", {"content": prompt})["tokens"]
    assert abs(len(tokens) - usage["prompt_tokens"]) <= 1  # the token that begins a text
    assert '"add"' in tools.post("/apply-template", {"messages": [USER], "tools": [ADD]})["prompt"]


# --- Anthropic's messages ---

ASK = {"model": MODEL, "max_tokens": 12, "messages": [USER], "temperature": 0}
TOOL = {"name": "add", "input_schema": INPUT_SCHEMA}
CALLS = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "add"}, "max_tokens": 200}


def test_a_message(server: Server) -> None:
    answer = server.post("/v1/messages", {**ASK, "system": [{"type": "text", "text": "Be brief."}]})
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", MODEL)
    assert [block["type"] for block in answer["content"]] == ["text"]
    assert answer["stop_reason"] in ("end_turn", "max_tokens")
    assert answer["usage"]["output_tokens"] > 0
    n_prompt = answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]
    body = {"messages": [USER], "system": "Be brief."}
    assert server.post("/v1/messages/count_tokens", body) == {"input_tokens": n_prompt}


def test_a_message_is_what_a_chat_is(server: Server) -> None:
    chat = {"messages": [USER], "max_tokens": 12, "temperature": 0}
    said = server.post("/v1/chat/completions", chat)["choices"][0]["message"]["content"]
    assert server.post("/v1/messages", ASK)["content"][0]["text"] == said
    deltas = [each for each in events(server, "/v1/messages", ASK) if each["type"] == "content_block_delta"]
    assert "".join(each["delta"]["text"] for each in deltas) == said


def test_a_stop_sequence_is_named(server: Server) -> None:
    said = server.post("/v1/messages", ASK)["content"][0]["text"]
    answer = server.post("/v1/messages", {**ASK, "stop_sequences": ["nowhere", said[2:5]]})
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", said[2:5])


def test_calls_and_their_results(tools: Server) -> None:
    answer = tools.post("/v1/messages", {**ASK, **CALLS})
    (call,) = answer["content"]
    assert (answer["stop_reason"], call["type"], call["name"]) == ("tool_use", "tool_use", "add")
    assert call["input"].keys() == {"a", "b"}
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "3"}]}
    history = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    then = tools.post("/v1/messages", {**ASK, "tools": [TOOL], "messages": history})
    assert then["content"]
    counted = [
        tools.post("/v1/messages/count_tokens", {"messages": history[:n], "tools": [TOOL]})["input_tokens"]
        for n in (1, 3)
    ]
    assert counted[1] > counted[0] + 10


def test_a_stream_of_calls(tools: Server) -> None:
    whole = tools.post("/v1/messages", {**ASK, **CALLS})["content"][0]
    stream = events(tools, "/v1/messages", {**ASK, **CALLS})
    kinds = [each["type"] for each in stream if each["type"] != "content_block_delta"]
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    pieces = [each["delta"]["partial_json"] for each in stream if each["type"] == "content_block_delta"]
    assert len(pieces) > 2
    assert json.loads("".join(pieces)) == whole["input"]
    assert stream[-2]["delta"]["stop_reason"] == "tool_use"


def test_thinking_has_a_block_and_a_budget(thinks: Server) -> None:
    body = {**ASK, "thinking": {"type": "enabled", "budget_tokens": 5}, "max_tokens": 30}
    answer = thinks.post("/v1/messages", body)
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    stream = events(thinks, "/v1/messages", body)
    starts = [each["content_block"]["type"] for each in stream if each["type"] == "content_block_start"]
    assert starts == ["thinking", "text"]
    history = [USER, {"role": "assistant", "content": answer["content"]}, USER]
    assert thinks.post("/v1/messages", {**body, "messages": history})["content"]


def test_a_last_message_of_the_assistant_goes_on(server: Server) -> None:
    messages = [USER, {"role": "assistant", "content": "The code of the"}]
    answer = server.post("/v1/messages", {**ASK, "messages": messages})
    assert not answer["content"][0]["text"].startswith("The code of the")


# --- OpenAI's responses ---


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def test_a_response(server: Server) -> None:
    chat = {"messages": [USER], "max_tokens": 12, "temperature": 0}
    said = server.post("/v1/chat/completions", chat)["choices"][0]["message"]["content"]
    options: Any = {"model": MODEL, "input": USER["content"], "max_output_tokens": 12, "temperature": 0}
    response = client_of(server).responses.create(**options)
    assert response.output_text == said
    assert response.usage
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    with client_of(server).responses.stream(**options) as stream:
        got = list(stream)
    texts = [each.delta for each in got if each.type == "response.output_text.delta"]
    final = got[-1].response  # type: ignore[union-attr]
    assert "".join(texts) == said == final.output_text
    assert got[-1].type == f"response.{final.status}" == f"response.{response.status}"


def test_calls_in_responses(tools: Server) -> None:
    options: Any = {
        "model": MODEL,
        "tools": [{"type": "function", "name": "add", "parameters": INPUT_SCHEMA, "strict": True}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    response = client_of(tools).responses.create(input=[USER], **options)  # type: ignore[list-item]
    (call,) = response.output
    assert call.type == "function_call"
    assert json.loads(call.arguments).keys() == {"a", "b"}
    history: list[Any] = [USER, call.model_dump(exclude_none=True)]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
    then = client_of(tools).responses.create(
        input=history, **{**options, "tool_choice": "none", "max_output_tokens": 4}
    )
    assert then.output_text
    with client_of(tools).responses.stream(input=[USER], **options) as stream:  # type: ignore[list-item]
        kinds = [each.type for each in stream]
        final = stream.get_final_response().output[0]
    assert kinds.count("response.function_call_arguments.delta") > 2
    assert final.type == "function_call"
    assert final.arguments == call.arguments


def test_thoughts_in_responses(thinks: Server) -> None:
    """Without a budget of its own a thought takes all."""
    response = client_of(thinks).responses.create(model=MODEL, input="Hello", max_output_tokens=10)
    assert [item.type for item in response.output] == ["reasoning"]
    assert response.status == "incomplete"
    assert response.usage
    assert response.usage.output_tokens_details.reasoning_tokens == 10


def test_structured_responses(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    response = client_of(server).responses.create(
        model=MODEL,
        input="Hello",
        text={"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}},
    )
    assert json.loads(response.output_text)["a"] in (1, 2)


# --- streams that wait ---


@pytest.fixture(scope="module")
def one_place() -> Iterator[Server]:
    with running("--n-ctx", "16384", "--parallel", "1") as server:
        yield server


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [5] * 40, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [USER], "max_tokens": 1}),
        ("/completion", {"prompt": [5] * 40, "n_predict": 1}),
    ],
)
def test_a_stream_says_how_far_its_prompt_is(one_place: Server, path: str, body: dict[str, Any]) -> None:
    """It waits for another request, so that there is time to say it however fast a machine is."""
    endless = {"prompt": "Once", "max_tokens": 12_000, "ignore_eos": True, "stream": True}
    expected = {**body, "stream": True, "return_progress": True}
    stream = partial(httpx.stream, "POST", timeout=PATIENCE)
    with stream(url=one_place.url + "/v1/completions", json=endless) as other:
        begun = other.iter_lines()  # which ends the stream when it goes
        next(begun)
        with stream(url=one_place.url + path, json=expected) as response:
            chunks = []
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    chunks.append(json.loads(line.removeprefix("data: ")))
                    if "prompt_progress" in chunks[-1]:
                        other.close()
    progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert progress
    assert progress[0]["processed"] == 0
    for each in progress:
        assert 0 <= each["processed"] <= each["total"] == progress[0]["total"]
    if isinstance(body.get("prompt"), list):
        assert progress[0]["total"] == 40
    processed = [each["processed"] for each in progress]
    assert processed == sorted(processed)
    assert processed[-1] == progress[0]["total"]
    assert "prompt_progress" not in chunks[-1], "an answer came"
