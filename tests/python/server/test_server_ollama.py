"""Ollama's API, by its own client."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.models.families import ADD, template_path
from support.patience import PATIENCE
from support.servers.server import MODEL, Server, key_file, running

ollama = pytest.importorskip("ollama", reason="needs the Python package ollama")

pytestmark = pytest.mark.full

KEY = "a-key-0123456789abcdef"
USER = {"role": "user", "content": "Where is the lamp?"}
BRIEF: dict[str, Any] = {"temperature": 0, "num_predict": 8}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--n-ctx", "2048", "--embeddings", "--embedding-n-ctx", "128") as server:
        yield server


@pytest.fixture(scope="module")
def tools() -> Iterator[Server]:
    template = str(template_path("Qwen-Qwen3-0.6B"))
    with running("--n-ctx", "4096", "--chat-format", template) as server:
        yield server


def client(server: Server, **headers: str) -> Any:
    return ollama.Client(host=server.url, headers=headers)


def openai_chat(server: Server, **body: Any) -> Any:
    return server.post(
        "/v1/chat/completions", {"messages": [USER], "temperature": 0, "max_tokens": 8, **body}
    )


def test_a_chat_is_openais_chat(server: Server) -> None:
    whole = client(server).chat(MODEL, [USER], options=BRIEF)
    expected = openai_chat(server)
    assert whole.message.content == expected["choices"][0]["message"]["content"] != ""
    assert (whole.model, whole.done, whole.done_reason) == (MODEL, True, "length")
    assert whole.prompt_eval_count == expected["usage"]["prompt_tokens"]
    assert whole.eval_count == expected["usage"]["completion_tokens"] == 8
    assert 0 < whole.prompt_eval_duration < whole.total_duration
    assert 0 < whole.eval_duration < whole.total_duration


def test_a_stream_says_the_same(server: Server) -> None:
    whole = client(server).chat(MODEL, [USER], options=BRIEF)
    *pieces, last = client(server).chat(MODEL, [USER], options=BRIEF, stream=True)
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert len(pieces) > 1
    assert not any(piece.done for piece in pieces)
    assert (last.done, last.done_reason, last.eval_count) == (True, "length", 8)


def test_lines_of_json_without_a_content_type(server: Server) -> None:
    """As `curl -d` sends it; a stream is the default."""
    body = json.dumps({"model": MODEL, "messages": [USER], "options": BRIEF}).encode()
    request = urllib.request.Request(f"{server.url}/api/chat", body)
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        assert response.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in response]
    assert lines[-1]["done"] is True


def test_a_prompt_is_a_chat_of_one(server: Server) -> None:
    ask = client(server)
    answer = ask.generate(MODEL, "Where is the lamp?", options=BRIEF)
    assert answer.response == openai_chat(server)["choices"][0]["message"]["content"]
    system = [{"role": "system", "content": "Be brief."}, USER]
    expected = openai_chat(server, messages=system)["choices"][0]["message"]["content"]
    assert ask.generate(MODEL, USER["content"], system="Be brief.", options=BRIEF).response == expected
    pieces = list(ask.generate(MODEL, USER["content"], options=BRIEF, stream=True))
    assert "".join(piece.response for piece in pieces) == answer.response


def test_a_raw_prompt_is_a_completion(server: Server) -> None:
    body = {"prompt": "The lamp", "temperature": 0, "max_tokens": 8}
    expected = server.post("/v1/completions", body)["choices"][0]["text"]
    assert client(server).generate(MODEL, "The lamp", raw=True, options=BRIEF).response == expected


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"temperature": 1.5, "seed": 3, "top_k": 50}, {"temperature": 1.5, "seed": 3, "top_k": 50}),
        ({"temperature": 2, "seed": 4, "top_p": 0.3}, {"temperature": 2, "seed": 4, "top_p": 0.3}),
        ({"temperature": 2, "seed": 4, "min_p": 0.3}, {"temperature": 2, "seed": 4, "min_p": 0.3}),
        ({"temperature": 0, "repeat_penalty": 3}, {"repeat_penalty": 3}),
        ({"temperature": 0, "stop": ["e"]}, {"stop": ["e"]}),
        ({"temperature": 0, "num_predict": 3}, {"max_tokens": 3}),
    ],
)
def test_options_are_openais_fields(server: Server, theirs: Any, ours: Any) -> None:
    answer = client(server).chat(MODEL, [USER], options={"num_predict": 8, **theirs})
    expected = openai_chat(server, **ours)
    assert answer.message.content == expected["choices"][0]["message"]["content"]
    assert answer.done_reason == expected["choices"][0]["finish_reason"]


def test_what_loads_a_model_is_ignored(server: Server) -> None:
    options = {**BRIEF, "num_ctx": 100_000, "num_gpu": 99, "num_thread": 2, "repeat_last_n": 32}
    for _ in range(2):
        assert client(server).chat(MODEL + ":latest", [USER], options=options, keep_alive="5m").done
    server.wait_for_log("num_ctx")
    server.wait_for_log("--n-ctx 100000")
    assert client(server).chat(MODEL, []).done_reason == "load"
    assert client(server).generate(MODEL).done_reason == "load"


def test_a_format_is_followed(server: Server) -> None:
    options = {"temperature": 0, "num_predict": 60}
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    assert json.loads(client(server).chat(MODEL, [USER], format=schema, options=options).message.content)[
        "n"
    ] in (1, 2)
    assert json.loads(client(server).generate(MODEL, "a", format=schema, options=options).response)["n"] in (
        1,
        2,
    )
    said = client(server).chat(MODEL, [USER], format="json", options=options).message.content
    assert said.lstrip().startswith("{")


def test_logprobs(server: Server) -> None:
    answer = client(server).chat(MODEL, [USER], options=BRIEF, logprobs=True, top_logprobs=2)
    assert len(answer.logprobs) == 8
    assert all(each.logprob <= 0 and len(each.top_logprobs) == 2 for each in answer.logprobs)
    stream = client(server).chat(MODEL, [USER], options=BRIEF, logprobs=True, stream=True)
    told = [each.token for piece in stream for each in piece.logprobs or ()]
    assert told == [each.token for each in answer.logprobs]


@pytest.mark.parametrize("template", ["tools", "server"])
def test_calls_and_their_results(template: str, request: pytest.FixtureRequest) -> None:
    tools: Server = request.getfixturevalue(template)
    forced: Any = {
        "messages": [USER],
        "tools": [ADD],
        "options": {"temperature": 0},
        "tool_choice": {"type": "function", "function": {"name": "add"}},
    }
    whole = tools.post("/api/chat", {**forced, "stream": False, "think": False})
    (call, *_) = whole["message"]["tool_calls"]
    assert call["function"]["name"] == "add"
    assert call["function"]["arguments"].keys() == {"a", "b"}
    assert whole["done_reason"] == "stop"
    body = json.dumps({**forced, "think": False}).encode()
    with urllib.request.urlopen(f"{tools.url}/api/chat", body, timeout=PATIENCE) as response:
        lines = [json.loads(line) for line in response]
    told = [call["function"] for line in lines for call in line["message"].get("tool_calls", ())]
    assert told == [call["function"] for call in whole["message"]["tool_calls"]]
    history = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_name": "add"},
    ]
    assert client(tools).chat(MODEL, history, tools=[ADD], options=BRIEF, think=False).done


def test_results_find_their_calls(tools: Server) -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    history = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "3", "tool_name": "add"},
        {"role": "tool", "content": "4"},
    ]
    body = {"messages": history, "tools": [ADD], "options": BRIEF, "think": False, "stream": False}
    answer = tools.post("/api/chat", body)
    calls = [
        {"id": f"call0000{i}", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}} for i in (1, 2)
    ]
    results = [{"role": "tool", "content": str(i + 2), "tool_call_id": f"call0000{i}"} for i in (1, 2)]
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    expected = openai_chat(tools, messages=messages, tools=[ADD], reasoning_effort="none")
    assert answer["prompt_eval_count"] == expected["usage"]["prompt_tokens"]
    assert answer["message"]["content"] == expected["choices"][0]["message"]["content"]
    with pytest.raises(ollama.ResponseError, match="tool_call_id"):
        client(tools).chat(MODEL, [USER, {"role": "tool", "content": "3"}], tools=[ADD])


def test_thoughts_are_apart(tools: Server) -> None:
    """The one template begins a thought in the prompt, the other ends it there."""
    with running("--n-ctx", "1024", "--chat-format", str(template_path("llama-cpp-deepseek-r1"))) as thinks:
        thought = client(thinks).chat(MODEL, [USER], options=BRIEF, think=True).message
        assert thought.thinking
        assert not thought.content
        pieces = list(client(thinks).chat(MODEL, [USER], options=BRIEF, think=True, stream=True))
        assert "".join(piece.message.thinking or "" for piece in pieces) == thought.thinking
    plain = client(tools).chat(MODEL, [USER], options=BRIEF, think=False).message
    assert plain.content
    assert not plain.thinking


def test_embeddings(server: Server) -> None:
    expected = [
        each["embedding"] for each in server.post("/v1/embeddings", {"input": ["a lamp", "a key"]})["data"]
    ]
    answer = client(server).embed(MODEL, ["a lamp", "a key"])
    for found, vector in zip(answer.embeddings, expected, strict=True):
        assert found == pytest.approx(vector, abs=1e-6)
    assert answer.prompt_eval_count > 0
    assert client(server).embeddings(MODEL, "a lamp").embedding == pytest.approx(expected[0], abs=1e-6)
    assert client(server).embed(MODEL, "").embeddings == []
    assert len(client(server).embed(MODEL, "the lamp " * 5000).embeddings) == 1
    with pytest.raises(ollama.ResponseError, match="128"):
        client(server).embed(MODEL, "the lamp " * 200, truncate=False)


def test_models(server: Server, tools: Server) -> None:
    ask = client(server)
    (listed,) = ask.list().models
    assert (listed.model, listed.details.family, len(listed.digest)) == (MODEL, "llama", 64)
    assert listed.details.parameter_size.endswith("M")
    assert listed.details.quantization_level == "Q8_0"
    (loaded,) = ask.ps().models
    assert (loaded.model, loaded.context_length) == (MODEL, 2048)
    shown = ask.show(MODEL)
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] > 0
    assert shown.template
    assert set(shown.capabilities) == {"completion", "embedding", "tools"}
    assert {"tools", "thinking"} <= set(client(tools).show(MODEL).capabilities)
    assert server.request("GET", "/api/version")[1]["version"]


def test_keys(tmp_path: Any) -> None:
    with running("--n-ctx", "512", "--api-key-file", str(key_file(tmp_path, f"anna:{KEY}"))) as server:
        assert client(server, authorization=f"Bearer {KEY}").list().models
        for ask in (ollama.Client.list, ollama.Client.ps, lambda it: it.chat(MODEL, [USER])):
            with pytest.raises(ollama.ResponseError, match="a key is needed"):
                ask(client(server))


def test_a_base_model_says_what_it_does(zoo_path: Callable[[str], Path]) -> None:
    with running("-m", str(zoo_path("llama-64")), "--n-ctx", "512") as server:
        with pytest.raises(
            ollama.ResponseError, match=r"base model: .*/api/generate, or .*--chat-format chatml"
        ):
            client(server).chat(MODEL, [{"role": "user", "content": "x"}])
        assert client(server).generate(MODEL, "On Monday", options={"num_predict": 4}).response
