"""Tools through the server, with clients as people have them.

The bundled model has never seen a tool. So calls are forced, mostly with the template of a model that has:
which words come is chance, their form is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from mixedkv_server.models import chat_format
from support.models.families import ADD, WEATHER, template_path
from support.models.recorded_calls import with_a_token_that_calls
from support.servers.server import MODEL, Server, running

pytestmark = pytest.mark.full

USER = {"role": "user", "content": "Will it rain in Oslo?"}
OPTIONS: dict[str, Any] = {"seed": 3, "max_tokens": 200, "temperature": 0}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": "3"}


TOLD_OF_TOOLS = ["Qwen-Qwen2.5-7B-Instruct", "mistralai-Mistral-Nemo-Instruct-2407"]


@pytest.fixture(
    scope="module",
    params=[TOLD_OF_TOOLS[0], pytest.param(TOLD_OF_TOOLS[1], marks=pytest.mark.nightly), "none"],
)
def server(request: Any) -> Iterator[Server]:
    """With templates that have tools, and with the bundled model's own, which has none."""
    template = ["--chat-format", str(template_path(request.param))] if request.param != "none" else []
    with running("--n-ctx", "8192", *template) as server:
        yield server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def ask(client: openai.OpenAI, messages: Any = (USER,), **options: Any) -> Any:
    options = {"tools": [WEATHER, ADD], "parallel_tool_calls": False, **OPTIONS, **options}
    return client.chat.completions.create(model=MODEL, messages=list(messages), **options)


def check(name: str, arguments: str) -> dict[str, Any]:
    """Arguments that follow their schema."""
    given = json.loads(arguments)
    if name == "add":
        assert given.keys() == {"a", "b"}
        assert given["a"] <= 99
        assert given["b"] in (1, 2)
    else:
        assert (name, given.keys()) == ("get_weather", {"city", "days"})
        assert len(given["city"]) <= 12
        assert 1 <= given["days"] <= 9
    return given


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "add"}),
        ({"type": "function", "function": {"name": "add"}}, {"add"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
    ],
)
def test_forced_calls(client: openai.OpenAI, choice: Any, names: set[str]) -> None:
    answer = ask(client, tool_choice=choice).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    assert call.type == "function"
    assert call.id
    assert call.function.name in names
    check(call.function.name, call.function.arguments)


def test_a_forced_call_in_a_stream(client: openai.OpenAI) -> None:
    whole = ask(client, tool_choice="required").choices[0].message.tool_calls[0].function
    chunks = list(ask(client, tool_choice="required", stream=True, stream_options={"include_usage": True}))
    assert chunks.pop().usage.completion_tokens > 5
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert len(calls) > 2, "arguments come piece by piece"
    assert [(call.index, call.function.name) for call in calls if call.id] == [(0, whole.name)]
    assert "".join(call.function.arguments or "" for call in calls) == whole.arguments


def test_choices_call_each_for_itself(client: openai.OpenAI) -> None:
    answer = ask(client, tool_choice="required", n=3, temperature=1.0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    ids = set()
    for choice in answer.choices:
        (call,) = choice.message.tool_calls
        check(call.function.name, call.function.arguments)
        ids.add(call.id)
    chunks = ask(client, tool_choice="required", n=3, temperature=1.0, stream=True)
    assert {c.choices[0].index for c in chunks if c.choices[0].delta.tool_calls} == {0, 1, 2}


def test_an_answer_that_is_cut_off_says_so(client: openai.OpenAI) -> None:
    assert ask(client, tool_choice="required", max_tokens=20).choices[0].finish_reason == "length"


def test_logprobs_come_with_calls(client: openai.OpenAI) -> None:
    whole = ask(client, tool_choice="required", logprobs=True).choices[0]
    assert whole.message.tool_calls
    chunks = list(ask(client, tool_choice="required", logprobs=True, stream=True))
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.logprobs.content]


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_model_may_answer_with_text(client: openai.OpenAI, choice: str) -> None:
    answer = ask(client, tool_choice=choice, max_tokens=8).choices[0]
    assert answer.message.tool_calls is None
    assert answer.message.content
    assert answer.finish_reason == "length"
    streamed = ask(client, tool_choice=choice, max_tokens=8, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == answer.message.content


def test_a_chat_goes_on_after_its_results(client: openai.OpenAI) -> None:
    messages: list[Any] = [USER]
    before = 0
    for turn in range(3):
        answer = ask(client, messages, tool_choice="required", seed=turn, temperature=1.0)
        assert answer.usage.prompt_tokens_details.cached_tokens >= 0.8 * before
        before = answer.usage.prompt_tokens
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        call = message.tool_calls[0]
        messages[-1]["tool_calls"][0]["id"] = f"call0000{turn}"  # Mistral takes its own form only
        messages.append({"role": "tool", "tool_call_id": f"call0000{turn}", "content": f"turn {turn}"})
        check(call.function.name, call.function.arguments)
    final = ask(client, messages, tool_choice="none", max_tokens=4)
    assert final.choices[0].message.content


def test_results_are_in_the_prompt(server: Server, client: openai.OpenAI) -> None:
    short = ask(client, [USER, CALLED, RESULT], max_tokens=1)
    long = ask(client, [USER, CALLED, {**RESULT, "content": "3" * 200}], max_tokens=1)
    assert long.usage.prompt_tokens > short.usage.prompt_tokens + 50
    without = server.post("/v1/chat/completions", {"messages": [USER, CALLED, RESULT], "max_tokens": 1})
    assert without["usage"]["prompt_tokens"] < short.usage.prompt_tokens


def test_a_prompt_with_tools_can_be_warmed(
    server: Server, client: openai.OpenAI, request: pytest.FixtureRequest
) -> None:
    if "mistral" in request.node.callspec.params["server"]:
        pytest.skip("its template has the tools in the last turn only, and no two turns of a user")
    tools = [{**ADD, "function": {**ADD["function"], "description": "warm " * 50}}]
    server.post("/v1/warm", {"messages": [USER], "tools": tools})
    usage = ask(client, tools=tools, tool_choice="required").usage
    assert usage.prompt_tokens_details.cached_tokens > 0.8 * usage.prompt_tokens


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With a template whose calls begin with one token: a bias makes the model choose it."""
    path = with_a_token_that_calls(tmp_path_factory.mktemp("template"))
    with running("--n-ctx", "4096", "--chat-format", str(path)) as server:
        yield server


def bias_to_call(server: Server) -> dict[str, Any]:
    (token,) = server.post("/tokenize", {"content": "@"})["tokens"]
    return {"logit_bias": {str(token): 100}}


@pytest.mark.parametrize("speculation", ["off", "prompt-lookup"])
def test_a_call_that_is_the_models_choice_follows_its_schema(calling: Server, speculation: str) -> None:
    client = openai.OpenAI(base_url=f"{calling.url}/v1", api_key="unused", max_retries=0)
    options: Any = {"tool_choice": "auto", "parallel_tool_calls": False, "tools": [ADD]}
    assert ask(client, **options, max_tokens=8).choices[0].message.tool_calls is None
    options |= bias_to_call(calling)
    options["extra_body"] = {"speculation": speculation}
    choice = ask(client, **options).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    check(call.function.name, call.function.arguments)
    chunks = list(ask(client, **options, stream=True))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    pieces = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
    check(pieces[0].function.name, "".join(piece.function.arguments or "" for piece in pieces))


def test_choices_begin_their_calls_each_for_itself(calling: Server) -> None:
    client = openai.OpenAI(base_url=f"{calling.url}/v1", api_key="unused", max_retries=0)
    answer = ask(client, n=3, temperature=1.0, parallel_tool_calls=False, **bias_to_call(calling))
    for choice in answer.choices:
        (call,) = choice.message.tool_calls
        check(call.function.name, call.function.arguments)


def test_a_schema_that_is_not_followed_is_no_error_where_a_call_is_the_models_choice(calling: Server) -> None:
    parameters = {"type": "object", "properties": {"all": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "sort", "parameters": parameters}}
    body = {"messages": [USER], "tools": [tool], "max_tokens": 2}
    assert calling.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    status, answer, _ = calling.request("POST", "/v1/chat/completions", {**body, "tool_choice": "required"})
    assert (status, answer["error"]["param"]) == (400, "tools")


def test_arguments_that_templates_cannot_read_are_refused(server: Server) -> None:
    for n in (200, 100_000):
        deep = {**CALL, "function": {"name": "add", "arguments": "[" * n + "]" * n}}
        body = {"messages": [USER, {**CALLED, "tool_calls": [deep]}], "max_tokens": 1}
        status, answer, _ = server.request("POST", "/v1/chat/completions", body)
        assert (status, answer["error"]["param"]) == (400, "messages"), answer
        assert "nested" in answer["error"]["message"]
    cut = {**CALL, "function": {"name": "add", "arguments": '{"a": 1, "b'}}
    body = {"messages": [USER, {**CALLED, "tool_calls": [cut]}], "max_tokens": 1}
    status, answer, _ = server.request("POST", "/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "messages"), answer
    assert "messages[1].tool_calls[0].function.arguments: no JSON" in answer["error"]["message"]


def test_a_session_has_no_tools(server: Server) -> None:
    session = server.post("/v1/context", {"model": MODEL, "prompt": "The"})["session_id"]
    body = {"messages": [USER], "tools": [ADD], "session_id": session}
    status, answer, _ = server.request("POST", "/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "session_id")


def test_a_format_is_a_name_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.jinja").write_text("{{ messages }}")
    assert chat_format("chatml") == ("chatml", "")
    assert chat_format(str(tmp_path / "a.jinja")) == ("", "{{ messages }}")
    with pytest.raises(ValueError, match=r"^chat_format=odd: .*: give a file, or the name of a format"):
        chat_format("odd")


def test_a_named_format_has_tools_too() -> None:
    with running("--n-ctx", "2048", "--chat-format", "chatml") as server:
        body = {"messages": [USER], "tools": [WEATHER, ADD], "tool_choice": "required", **OPTIONS}
        answer = server.post("/v1/chat/completions", {**body, "reasoning_effort": "high"})
        assert server.post(
            "/v1/chat/completions", {"messages": [USER], "reasoning_effort": "high", **OPTIONS}
        )
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    check(call["function"]["name"], call["function"]["arguments"])
