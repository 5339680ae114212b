"""Libraries that agents are made of, unchanged; each is skipped where it is not installed.

The bundled model has never seen a tool. So calls are forced, or a bias makes it begin one by itself, and
another bias lets strings and objects end soon.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator
from typing import Annotated, Any

import openai
import pytest
from pydantic import BaseModel, Field

from support.models.recorded_calls import with_a_token_that_calls
from support.servers.server import MODEL, Server, running

pytestmark = pytest.mark.nightly

LOOP = asyncio.new_event_loop()  # one for all: clients keep connections between tests
BRIEF: dict[str, int] = {}
CALLING: dict[str, int] = {}


Small = Annotated[int, Field(ge=0, le=99)]  # other numbers have no end to this model


class Sum(BaseModel):
    a: Small
    b: Small


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return LOOP.run_until_complete(work)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = str(with_a_token_that_calls(tmp_path_factory.mktemp("template")))
    with running("--n-ctx", "8192", "--chat-format", template) as server:
        for text, bias in (('"', 30), ("}", 30), ("@", 100)):
            (token,) = server.post("/tokenize", {"content": text})["tokens"]
            CALLING[str(token)] = bias
        BRIEF.update({token: bias for token, bias in CALLING.items() if bias < 100})
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
        result = run(agent.run("What are 1 and 2?"))
        assert isinstance(result.output, Sum)
        assert result.usage.output_tokens > 0


def test_pydantic_ai_streams_and_calls(url: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="needs the package pydantic-ai-slim[openai]")
    from pydantic_ai.direct import model_request
    from pydantic_ai.messages import ModelRequest
    from pydantic_ai.models import ModelRequestParameters
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.tools import ToolDefinition

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key="unused"))
    settings: Any = {"temperature": 0.0, "max_tokens": 12}

    async def stream() -> tuple[list[str], str]:
        async with pydantic_ai.Agent(model, model_settings=settings).run_stream(
            "What are 1 and 2?"
        ) as answer:
            return [text async for text in answer.stream_text(debounce_by=None)], await answer.get_output()

    texts, whole = run(stream())
    assert len(texts) > 2
    assert texts[-1] == whole

    tool = ToolDefinition(name="add", parameters_json_schema=Sum.model_json_schema())
    asked = ModelRequestParameters(function_tools=[tool], allow_text_output=True)  # tool_choice: auto
    request = [ModelRequest.user_text_prompt("What are 1 and 2?")]
    for bias, calls in ((BRIEF, 0), (CALLING, 1)):
        chosen: Any = {
            **settings,
            "max_tokens": 200 if calls else 8,
            "logit_bias": bias,
            "parallel_tool_calls": False,
        }
        answer = run(model_request(model, request, model_settings=chosen, model_request_parameters=asked))
        assert len(answer.tool_calls) == calls
        assert bool(answer.text) != bool(calls)
        for call in answer.tool_calls:
            assert Sum.model_validate(call.args_as_dict())


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
    partial = client.chat.completions.create_partial(
        model=MODEL,
        response_model=Sum,
        messages=[{"role": "user", "content": "What are 1 and 2?"}],
        max_tokens=200,
        temperature=0,
        logit_bias=BRIEF,
        max_retries=0,
    )
    assert Sum.model_validate(list(partial)[-1].model_dump())


def adding() -> tuple[Any, Any, list[Sum]]:
    """The package of OpenAI's agents, a tool that adds, and what it was given."""
    agents = pytest.importorskip("agents", reason="needs the package openai-agents")
    agents.set_tracing_disabled(True)
    given: list[Sum] = []

    @agents.function_tool  # type: ignore[untyped-decorator]
    def add(numbers: Sum) -> str:
        """The sum of two numbers."""
        given.append(numbers)
        return str(numbers.a + numbers.b)

    return agents, add, given


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_openai_agents(url: str, kind: str) -> None:
    agents, add, given = adding()
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
    result = run(agents.Runner.run(agent, "What is 1 and 2?"))
    if kind == "chat":
        assert result.final_output == str(given[0].a + given[0].b)
    else:
        assert isinstance(result.final_output, Sum)


def test_openai_agents_stream_and_call(url: str) -> None:
    agents, add, given = adding()
    client = openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0)
    settings = agents.ModelSettings(
        temperature=0.0, max_tokens=300, parallel_tool_calls=False, extra_body={"logit_bias": CALLING}
    )
    agent = agents.Agent(
        name="adder",
        tools=[add],
        model=agents.OpenAIChatCompletionsModel(MODEL, client),
        model_settings=settings,
        tool_use_behavior="stop_on_first_tool",
    )

    async def stream() -> tuple[set[str], str]:
        result = agents.Runner.run_streamed(agent, "What is 1 and 2?")
        kinds = {
            event.data.type async for event in result.stream_events() if event.type == "raw_response_event"
        }
        return kinds, result.final_output

    kinds, output = run(stream())
    assert "response.function_call_arguments.delta" in kinds
    assert output == str(given[0].a + given[0].b)


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
    model.additional_kwargs = {"logit_bias": CALLING}
    answer = model.chat_with_tools([tool], user_msg="What are 1 and 2?", allow_parallel_tool_calls=False)
    (call,) = model.get_tool_calls_from_response(answer)
    assert call.tool_kwargs.keys() == {"a", "b"}
    model.additional_kwargs = {"logit_bias": BRIEF}
    model.should_use_structured_outputs = True
    assert isinstance(model.as_structured_llm(Sum).chat(question).raw, Sum)


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
        **{**options, "max_tokens": 200},
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        logit_bias=BRIEF,
    )
    (call,) = called.choices[0].message.tool_calls
    assert Sum.model_validate_json(call.function.arguments)
    own = {**options, "max_tokens": 200, "tools": [tool], "parallel_tool_calls": False, "logit_bias": CALLING}
    chunks = list(litellm.completion(**own, stream=True))
    whole = litellm.stream_chunk_builder(chunks).choices[0].message
    assert Sum.model_validate_json(whole.tool_calls[0].function.arguments)
    structured = litellm.completion(**{**options, "max_tokens": 200}, response_format=Sum, logit_bias=BRIEF)
    assert Sum.model_validate_json(structured.choices[0].message.content)


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
        extra_body={"temperature": 0},  # which its latest version does not send
    )
    assert called.stop_reason == "tool_use"
    assert called.content[0].input["a"] in (1, 2)
    form = {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        said = client.messages.create(
            **{**options, "max_tokens": 100}, extra_body={"temperature": 0, **fields}
        )
        assert json.loads(said.content[0].text)["a"] in (1, 2)
    with pytest.raises(anthropic.BadRequestError, match="tools"):
        client.messages.create(
            **options,
            tools=[{"name": "choose", "input_schema": schema}],
            extra_body={"output_config": {"format": form}},
        )
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**{**options, "max_tokens": 0})
