"""Models that think, through the server.

The bundled model has never thought. So the server has the template of a model that does: what it takes for a
thought is chance, where it ends is its budget.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from support.models.families import ADD, template_path
from support.servers.server import MODEL, Server, running

pytestmark = pytest.mark.full

USER = {"role": "user", "content": "Will it rain in Oslo?"}
OPTIONS: dict[str, Any] = {"seed": 3, "max_tokens": 40, "temperature": 0}
BEGUN, OWN = "llama-cpp-deepseek-r1", "Qwen-Qwen3-0.6B"  # a thought is begun by the prompt, or by the model


def serve(template: str, *options: str) -> Any:
    return running("--n-ctx", "8192", "--chat-format", str(template_path(template)), *options)


@pytest.fixture(scope="module")
def begun() -> Iterator[Server]:
    with serve(BEGUN) as server:
        yield server


@pytest.fixture(scope="module")
def own() -> Iterator[Server]:
    with serve(OWN) as server:
        yield server


def ask(server: Server, messages: Any = (USER,), **options: Any) -> Any:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    extra = {name: options.pop(name) for name in list(options) if name in EXTRA}
    return client.chat.completions.create(
        model=MODEL, messages=list(messages), extra_body=extra, **{**OPTIONS, **options}
    )


EXTRA = {"reasoning_budget_tokens", "chat_template_kwargs", "continue_final_message", "regex"}


def prompt_of(server: Server, **body: Any) -> str:
    return server.post("/apply-template", {"messages": [USER], **body})["prompt"]


def test_thoughts_come_apart(begun: Server) -> None:
    answer = ask(begun, reasoning_budget_tokens=5)
    message = answer.choices[0].message
    assert message.reasoning_content
    assert message.content
    assert "</think>" not in message.reasoning_content
    assert not message.content.lstrip().startswith("</think>")  # later on the model may say anything
    n_close = len(begun.post("/tokenize", {"content": "</think>"})["tokens"])
    assert answer.usage.completion_tokens_details.reasoning_tokens == 5 + n_close
    assert answer.usage.completion_tokens == 40


def test_thoughts_come_apart_in_a_stream(begun: Server) -> None:
    whole = ask(begun, reasoning_budget_tokens=8).choices[0].message
    deltas = [chunk.choices[0].delta for chunk in ask(begun, reasoning_budget_tokens=8, stream=True)]
    thoughts = [delta.reasoning_content for delta in deltas if getattr(delta, "reasoning_content", None)]
    assert len(thoughts) > 1
    assert "".join(thoughts) == whole.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == whole.content


def test_log_probabilities_are_those_of_the_text(begun: Server) -> None:
    def text(entries: Any) -> str:
        return b"".join(bytes(each.bytes) for each in entries).decode("utf-8", "replace")

    choice = ask(begun, reasoning_budget_tokens=6, logprobs=True, top_logprobs=1).choices[0]
    assert choice.message.reasoning_content
    assert text(choice.logprobs.content).strip() == choice.message.content.strip()
    chunks = ask(begun, reasoning_budget_tokens=6, logprobs=True, stream=True)
    found = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert text(e for each in found if each.logprobs for e in each.logprobs.content) == text(
        choice.logprobs.content
    )
    assert not any(each.logprobs for each in found if getattr(each.delta, "reasoning_content", None))


def test_no_budget_at_all_is_no_thought(begun: Server) -> None:
    assert not getattr(ask(begun, reasoning_budget_tokens=0).choices[0].message, "reasoning_content", None)


def test_a_thought_without_end_is_all_there_is(begun: Server) -> None:
    message = ask(begun).choices[0].message
    assert message.reasoning_content
    assert not message.content


@pytest.mark.parametrize("template", ["begun", "own"])
def test_what_is_constrained_comes_after_the_thought(template: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(template)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answer = ask(server, reasoning_budget_tokens=6, response_format=form, temperature=1.0, max_tokens=80)
    assert json.loads(answer.choices[0].message.content)["a"] in (1, 2)
    thoughts = getattr(answer.choices[0].message, "reasoning_content", None)
    assert bool(thoughts) == (template == "begun")


def test_a_constraint_waits_for_the_end_of_a_thought_that_ends_itself(begun: Server) -> None:
    """By chance it would take long: a bias makes the end certain."""
    close = begun.post("/tokenize", {"content": "</think>"})["tokens"]
    answer = ask(begun, regex="[a-c]{3}", max_tokens=60, logit_bias={str(token): 100 for token in close})
    message = answer.choices[0].message
    if answer.choices[0].finish_reason == "stop":
        assert len(message.content) == 3
    else:
        assert not message.content


@pytest.mark.parametrize(
    "change", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}]
)
def test_thinking_can_be_turned_off(own: Server, change: Any) -> None:
    assert prompt_of(own, **change).endswith("<think>\n\n</think>\n\n")
    assert not prompt_of(own).endswith("</think>\n\n")
    message = ask(own, **change).choices[0].message
    assert message.content
    assert not getattr(message, "reasoning_content", None)


@pytest.mark.parametrize(
    "options", [("--reasoning", "off"), ("--chat-template-kwargs", '{"enable_thinking": false}')]
)
def test_thinking_can_be_turned_off_for_all(options: tuple[str, ...]) -> None:
    """A request that says something about it is answered as it says."""
    with serve(OWN, *options) as server:
        assert prompt_of(server).endswith("<think>\n\n</think>\n\n")
        for change in ({"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "low"}):
            assert not prompt_of(server, **change).endswith("</think>\n\n")
        both = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
        assert prompt_of(server, **both).endswith("</think>\n\n")
        asked = {"model": MODEL, "messages": [USER]}
        count = {
            name: server.post("/v1/messages/count_tokens", {**asked, **change})["input_tokens"]
            for name, change in (("as_served", {}), ("on", {"thinking": {"type": "adaptive"}}))
        }
        assert count["on"] < count["as_served"]


def test_a_budget_of_all_thoughts() -> None:
    with serve(BEGUN, "--reasoning-budget", "0") as server:
        assert not getattr(ask(server).choices[0].message, "reasoning_content", None)
        assert ask(server, reasoning_budget_tokens=5).choices[0].message.reasoning_content


def test_effort_and_variables_reach_the_template() -> None:
    with serve("openai-gpt-oss-120b") as server:
        assert "Reasoning: high" in prompt_of(server, reasoning_effort="high")
        prompt = prompt_of(server, chat_template_kwargs={"model_identity": "I am a test."})
        assert "I am a test." in prompt


@pytest.mark.slow
def test_ten_turns_of_tools_and_thoughts_evaluate_what_is_new(begun: Server) -> None:
    """Each turn calls a tool, reads its result and thinks before it answers."""
    messages: list[Any] = [{"role": "system", "content": "You are brief. " * 40}]
    opening = len(begun.post("/tokenize", {"content": "<think>\n"})["tokens"]) + 1
    before, thought = 0, 0
    tools = {"tools": [ADD], "parallel_tool_calls": False}

    def turn(**options: Any) -> Any:
        nonlocal before
        answer = ask(begun, messages, **tools, **options)
        usage = answer.usage
        evaluated = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
        assert usage.prompt_tokens_details.cached_exact
        assert not before or evaluated <= usage.prompt_tokens - before + opening, (len(messages), evaluated)
        before = usage.prompt_tokens
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        return answer

    for i in range(10):
        messages.append({"role": "user", "content": f"Question {i}?"})
        called = turn(tool_choice="required", reasoning_budget_tokens=60, max_tokens=300)
        (call,) = called.choices[0].message.tool_calls
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"The result is {i}."})
        usage = turn(reasoning_budget_tokens=60, max_tokens=90).usage
        thought += usage.completion_tokens_details.reasoning_tokens
    assert thought > 500


def test_a_session_that_grows_keeps_thoughts_apart(begun: Server) -> None:
    begun.post("/v1/context", {"model": MODEL, "session_id": "thinks", "messages": [USER]})
    more = {"role": "user", "content": "Go on."}
    asked = {"session_id": "thinks", "messages": [more], **OPTIONS}
    answer = begun.post("/v1/chat/completions", {**asked, "append": True})["choices"][0]["message"]
    assert answer["reasoning_content"]
    history = {"messages": [USER, more, answer, more], **OPTIONS}
    expected, got = (begun.post("/v1/chat/completions", body)["usage"] for body in (history, asked))
    assert got["prompt_tokens"] == expected["prompt_tokens"]


def test_an_answer_goes_on_from_its_beginning(own: Server) -> None:
    messages = [USER, {"role": "assistant", "content": "It will be"}]
    prompt = prompt_of(own, messages=messages, continue_final_message=True)
    assert prompt.endswith("It will be")
    answer = ask(own, messages, continue_final_message=True).choices[0].message
    assert answer.content
    assert not answer.content.startswith("It will be")
    streamed = ask(own, messages, continue_final_message=True, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == answer.content


def test_thoughts_and_calls(begun: Server) -> None:
    """A forced call comes at once: the thought that the prompt has begun is ended."""
    message = ask(begun, tools=[ADD], tool_choice="required", max_tokens=200).choices[0].message
    assert message.tool_calls
    assert not getattr(message, "reasoning_content", None)
