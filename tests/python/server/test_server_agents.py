"""Libraries that agents are made of, unchanged; each is skipped where it is not installed.

The bundled model has never seen a tool, so calls are forced, and a bias lets strings and objects end soon.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Annotated, Any

import openai
import pytest
from pydantic import BaseModel, Field

from support.families import template_path
from support.server_support import MODEL, Server, running

BRIEF: dict[str, int] = {}


Small = Annotated[int, Field(ge=0, le=99)]  # other numbers have no end to this model


class Sum(BaseModel):
    a: Small
    b: Small


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    template = str(template_path("Qwen-Qwen2.5-7B-Instruct"))
    with running("--n-ctx", "8192", "--chat-template", template) as server:
        for text in ('"', "}"):
            (token,) = server.post("/tokenize", {"content": text})["tokens"]
            BRIEF[str(token)] = 30
        yield server


@pytest.fixture
def url(server: Server) -> str:
    return f"{server.url}/v1"


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_pydantic_ai(url: str, kind: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="needs the package pydantic-ai-slim[openai]")
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    make = OpenAIChatModel if kind == "chat" else OpenAIResponsesModel
    model = make(MODEL, provider=OpenAIProvider(base_url=url, api_key="unused"))
    settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": 200, "parallel_tool_calls": False}
    if kind == "chat":
        settings["logit_bias"] = BRIEF
    native = pydantic_ai.NativeOutput(Sum)
    for output in (Sum, native) if kind == "chat" else (native,):
        agent = pydantic_ai.Agent(model, output_type=output, model_settings=settings)
        result = asyncio.run(agent.run("What are 1 and 2?"))
        assert isinstance(result.output, Sum)
        assert result.usage.output_tokens > 0


def test_instructor(url: str) -> None:
    instructor = pytest.importorskip("instructor", reason="needs the package instructor")
    raw = openai.OpenAI(base_url=url, api_key="unused", max_retries=0)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(raw, mode=mode)
        answer = client.chat.completions.create(
            model=MODEL,
            response_model=Sum,
            messages=[{"role": "user", "content": "What are 1 and 2?"}],
            max_tokens=200,
            temperature=0,
            logit_bias=BRIEF,
            max_retries=0,
        )
        assert isinstance(answer, Sum)


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_openai_agents(url: str, kind: str) -> None:
    agents = pytest.importorskip("agents", reason="needs the package openai-agents")
    agents.set_tracing_disabled(True)
    given: list[Sum] = []

    @agents.function_tool  # type: ignore[untyped-decorator]
    def add(numbers: Sum) -> str:
        """The sum of two numbers."""
        given.append(numbers)
        return str(numbers.a + numbers.b)

    client = openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0)
    make = agents.OpenAIChatCompletionsModel if kind == "chat" else agents.OpenAIResponsesModel
    settings = agents.ModelSettings(
        temperature=0.0,
        max_tokens=300,
        tool_choice="required",
        parallel_tool_calls=False,
        extra_body={"logit_bias": BRIEF} if kind == "chat" else None,
    )
    agent = agents.Agent(
        name="adder",
        instructions="Add.",
        tools=[add],
        model=make(MODEL, client),
        model_settings=settings,
        tool_use_behavior="stop_on_first_tool",
    )
    if kind == "responses":
        talker = agents.ModelSettings(max_tokens=200)
        agent = agents.Agent(
            name="counter", model=make(MODEL, client), model_settings=talker, output_type=Sum
        )
    result = asyncio.run(agents.Runner.run(agent, "What is 1 and 2?"))
    if kind == "chat":
        assert result.final_output == str(given[0].a + given[0].b)
    else:
        assert isinstance(result.final_output, Sum)


def test_llama_index(url: str) -> None:
    pytest.importorskip("llama_index.llms.openai_like", reason="needs llama-index-llms-openai-like")
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=MODEL,
        api_base=url,
        api_key="unused",
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0.0,
        max_tokens=200,
        context_window=8192,
        additional_kwargs={"logit_bias": BRIEF},
    )
    question = [ChatMessage(role="user", content="What are 1 and 2?")]
    whole = model.chat(question).message.content
    assert whole
    assert "".join(piece.delta or "" for piece in model.stream_chat(question)) == whole

    def add(a: int, b: int) -> int:
        """The sum of two numbers."""
        return a + b

    tool = FunctionTool.from_defaults(add)
    answer = model.chat_with_tools([tool], user_msg="What are 1 and 2?", tool_required=True)
    (call,) = model.get_tool_calls_from_response(answer)
    assert call.tool_name == "add"
    assert call.tool_kwargs.keys() == {"a", "b"}


def test_litellm(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would look for one elsewhere
    litellm = pytest.importorskip("litellm", reason="needs the package litellm")
    options: dict[str, Any] = {
        "model": f"openai/{MODEL}",
        "api_base": url,
        "api_key": "unused",
        "messages": [{"role": "user", "content": "What are 1 and 2?"}],
        "temperature": 0,
        "max_tokens": 12,
    }
    whole = litellm.completion(**options).choices[0].message.content
    assert whole
    streamed = litellm.completion(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == whole
    tool = {"type": "function", "function": {"name": "Sum", "parameters": Sum.model_json_schema()}}
    called = litellm.completion(
        **{**options, "max_tokens": 200}, tools=[tool], tool_choice="required", parallel_tool_calls=False,
        logit_bias=BRIEF,
    )  # fmt: skip
    (call,) = called.choices[0].message.tool_calls
    assert Sum.model_validate_json(call.function.arguments)


def test_anthropic(server: Server) -> None:
    anthropic = pytest.importorskip("anthropic", reason="needs the package anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0)
    options: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 12,
        "messages": [{"role": "user", "content": "What are 1 and 2?"}],
    }
    with client.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text
    assert final.usage.output_tokens > 0
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    called = client.messages.create(
        **{**options, "max_tokens": 100},
        tools=[{"name": "choose", "input_schema": schema}],
        tool_choice={"type": "tool", "name": "choose", "disable_parallel_tool_use": True},
    )
    assert called.stop_reason == "tool_use"
    assert called.content[0].input["a"] in (1, 2)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**{**options, "max_tokens": 0})
