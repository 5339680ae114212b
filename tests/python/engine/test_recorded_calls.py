"""Recorded outputs of each family: read by llama.cpp's chat layer, and constrained once a call has begun."""

from __future__ import annotations

import json
from copy import copy, deepcopy
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from mixedkv.constrain.constraint import ConstraintCompiler, Matcher
from mixedkv.engine.chat.chat_template import ChatRenderer, RenderedChat, ToolChoice
from mixedkv.engine.jobs.job import CallTrigger
from mixedkv.engine.stepping import follow
from mixedkv.engine.text.answer_reader import ReadAnswer
from mixedkv.engine.text.thought import Thought
from support.models.recorded_calls import CLOCK, FOUND, RECORDED, SEARCH, TIME, TOOLS, Recorded

pytestmark = pytest.mark.full

USER = {"role": "user", "content": "Find the note."}
END = 256
BYTES = ConstraintCompiler.of_tokens([*(bytes([i]) for i in range(256)), b"\xff<end>"], [END])
LAZY = [each for each in RECORDED if each.lazy]


@cache
def renderer(template: str) -> ChatRenderer:
    return ChatRenderer(family(template).source, "<s>", "</s>")


def rendered(recorded: Recorded, parallel: bool = True) -> RenderedChat:
    return renderer(recorded.template).render([USER], TOOLS, ToolChoice(parallel=parallel))


def family(template: str) -> Recorded:
    return next(each for each in RECORDED if each.template == template)


def name(recorded: Recorded) -> str:
    return recorded.template


def check(answer: ReadAnswer, recorded: Recorded) -> None:
    calls = tuple((call.name, json.loads(call.arguments)) for call in answer.calls)
    assert calls == recorded.calls
    assert answer.content.strip() == recorded.content
    assert answer.reasoning.strip() == recorded.reasoning


@pytest.mark.parametrize("recorded", RECORDED, ids=name)
def test_an_output_says_what_it_says(recorded: Recorded) -> None:
    chat = rendered(recorded)
    assert SEARCH["function"]["name"] in chat.text
    assert USER["content"] in chat.text
    reader = chat.reader()
    reader.feed(recorded.text, last=True)
    check(reader.answer, recorded)


@pytest.mark.parametrize("recorded", RECORDED, ids=name)
def test_an_output_says_the_same_as_it_comes(recorded: Recorded) -> None:
    reader, parts = rendered(recorded).reader(), []
    for character in recorded.text:
        parts += reader.feed(character)
    parts += reader.feed("", last=True)
    check(reader.answer, recorded)
    said = ReadAnswer(
        content="".join(part.content for part in parts), reasoning="".join(part.reasoning for part in parts)
    )
    assert (said.content, said.reasoning) == (reader.answer.content, reader.answer.reasoning)
    for i, call in enumerate(reader.answer.calls):
        own = [part for part in parts if part.index == i]
        assert [part.name for part in own if part.name] == [call.name]
        assert "".join(part.arguments for part in own) == call.arguments


@pytest.mark.parametrize("recorded", RECORDED, ids=name)
def test_an_output_that_is_cut_off_says_the_same_at_once_and_as_it_comes(recorded: Recorded) -> None:
    """At every character; a call whose arguments are not all there is not complete."""
    chat = rendered(recorded)
    coming = chat.reader()
    for i, character in enumerate(recorded.text):
        whole, stream = chat.reader(), copy(coming)
        stream.answer = deepcopy(coming.answer)
        whole.feed(recorded.text[:i], last=True)
        stream.feed("", last=True)
        assert said(whole.answer) == said(stream.answer), recorded.text[:i]
        for call, (called, arguments) in zip(whole.answer.calls, recorded.calls, strict=False):
            assert call.name == called
            assert call.complete == (json_or_none(call.arguments) == arguments)
        incomplete = len(whole.answer.complete_calls) < len(whole.answer.calls)
        assert whole.answer.finish_reason("length") == "length"
        assert (whole.answer.finish_reason("stop") == "length") == incomplete
        coming.feed(character)


def said(answer: ReadAnswer) -> tuple[object, ...]:
    calls = [(call.name, call.arguments, call.complete) for call in answer.calls]
    return answer.content, answer.reasoning, calls


def json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


@pytest.mark.parametrize("recorded", RECORDED, ids=name)
def test_calls_and_results_go_into_the_next_prompt(recorded: Recorded) -> None:
    reader = rendered(recorded).reader()
    reader.feed(recorded.text, last=True)
    call = reader.answer.calls[0]
    function = {"name": call.name, "arguments": call.arguments}
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call.id, "type": "function", "function": function}],
    }
    result = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": "7 of them"}
    chat = renderer(recorded.template).render([USER, called, result], TOOLS, ToolChoice())
    after = chat.text[chat.text.index(USER["content"]) :]
    assert after.index("search_notes") < after.index("7 of them")
    assert "north" in after


def calls_begin(recorded: Recorded, text: str, parallel: bool = True) -> tuple[Matcher | None, int]:
    """A text byte by byte up to where a call is constrained, and how many bytes that is."""
    chat = rendered(recorded, parallel)
    assert chat.constraint is not None
    trigger = CallTrigger(chat.triggers, BYTES.compile(chat.constraint))
    for i, byte in enumerate(text.encode()):
        if (matcher := trigger.take(bytes([byte]))) is not None:
            return matcher, i + 1
    return None, len(text.encode())


@pytest.mark.parametrize("recorded", RECORDED, ids=name)
def test_which_families_have_words_that_begin_a_call(recorded: Recorded) -> None:
    assert bool(rendered(recorded).triggers) == recorded.lazy


@pytest.mark.parametrize("recorded", LAZY, ids=name)
def test_nothing_holds_before_a_call(recorded: Recorded) -> None:
    chat = rendered(recorded)
    matcher, n = calls_begin(recorded, 'It <b>may</b> rain {"name": 5} [1] `x`.')
    assert matcher is None
    matcher, n = calls_begin(recorded, recorded.text)
    assert any(recorded.text.encode()[:n].endswith(word.encode()) for word in chat.triggers)


@pytest.mark.parametrize("recorded", LAZY, ids=name)
def test_a_call_that_has_begun_is_one(recorded: Recorded) -> None:
    matcher, n = calls_begin(recorded, recorded.text)
    assert matcher is not None
    data = recorded.text.encode()
    assert len(matcher.allowed()) < 50, "the name of a function is no choice of any byte"
    for i in range(n, len(data)):
        assert matcher.allows(data[i]), (data[:i], data[i:])
        matcher.accept(data[i])
    assert END in matcher.allowed().tolist()


@pytest.mark.parametrize("recorded", [each for each in LAZY if '"limit": 5' in each.text], ids=name)
def test_arguments_of_a_call_that_has_begun_follow_the_schema(recorded: Recorded) -> None:
    matcher, n = calls_begin(recorded, recorded.text)
    assert matcher is not None
    data = recorded.text.encode()
    for byte in data[n : data.index(b'"limit": 5') + len(b'"limit": ')]:
        matcher.accept(byte)
    assert {chr(token) for token in matcher.allowed() if chr(token) in '-0123456789"'} == set("123456789")


@pytest.mark.parametrize("recorded", RECORDED, ids=name)
def test_a_forced_call_can_be_the_recorded_one(recorded: Recorded) -> None:
    chat = renderer(recorded.template).render([USER], TOOLS, ToolChoice(mode="required"))
    assert chat.constraint is not None
    matcher = BYTES.compile(chat.constraint)
    first = next((word for word in rendered(recorded).triggers if word in recorded.text), "")
    text = recorded.text[recorded.text.index(first) :] if first else recorded.text
    if recorded.template == "gpt-oss":
        text = text[text.rindex("<|channel|>") :]
    elif chat.text.rstrip().endswith("<think>"):
        text = f"</think>{text}"  # a thought that the prompt has begun is ended
    for i, byte in enumerate(text.encode()):
        assert matcher.allows(byte), (text.encode()[:i], text.encode()[i:])
        matcher.accept(byte)


def test_one_call_or_several() -> None:
    qwen = family("qwen2.5")
    first = qwen.text[: qwen.text.index("</tool_call>") + len("</tool_call>")]
    for parallel in (True, False):
        matcher, n = calls_begin(qwen, first, parallel)
        assert matcher is not None
        for byte in first.encode()[n:]:
            matcher.accept(byte)
        assert END in matcher.allowed().tolist()
        assert matcher.allows(ord("<")) == parallel


def test_a_token_may_go_on_beyond_the_first_words() -> None:
    chat = rendered(family("qwen2.5"))
    assert chat.constraint is not None
    for token, holds in ((b'call>\n{"na', True), (b"call>\nperhaps", False)):
        trigger = CallTrigger(chat.triggers, BYTES.compile(chat.constraint))
        assert trigger.take(b"So: <tool_") is None
        matcher = trigger.take(token)
        assert (matcher is not None) == holds
        if matcher is not None:
            assert matcher.allowed().tolist() == [ord("m")]
        assert trigger.take(b"<tool_call>\n") is None, "one answer, one matcher"


NOT_FOLLOWED: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
ODD = [{"type": "function", "function": {"name": "odd", "parameters": NOT_FOLLOWED}}]
MANY = [{**CLOCK, "function": {**CLOCK["function"], "name": f"read_{i}"}} for i in range(128)]


def test_what_is_thought_is_no_call() -> None:
    chat = rendered(family("qwen3"))
    assert chat.constraint is not None
    assert chat.thoughts is not None
    held: list[Matcher] = []
    answer: Any = SimpleNamespace(
        thought=Thought(chat.thoughts, close=[]),
        trigger=CallTrigger(chat.triggers, BYTES.compile(chat.constraint)),
        sampler=SimpleNamespace(hold_to=held.append),
    )
    for text in ("<think>", "I could say\n<tool_call>\n", "but no", "</think>", "\n\nSo: <tool_", "call>"):
        follow(answer, text.encode())
    assert held == []
    follow(answer, b"\n")
    assert len(held) == 1
    assert held[0].allows(ord("{"))


@pytest.mark.parametrize("tools", [ODD, MANY])
def test_what_cannot_be_followed_is_the_models_own(tools: list[dict[str, Any]]) -> None:
    chat = renderer("qwen2.5").render([USER], tools, ToolChoice())
    assert chat.constraint is None
    assert chat.triggers == ()


def test_the_recorded_outputs_are_of_many_families() -> None:
    assert len(RECORDED) >= 12
    assert FOUND != TIME


@pytest.mark.parametrize("schema", [{"enum": []}, {"$ref": "#/definitions/nothing"}, False])
def test_a_schema_that_nothing_reads_is_told_apart_from_messages(schema: Any) -> None:
    arguments = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": arguments}}
    with pytest.raises(ValueError, match=r"^tools: the parameters of f cannot be followed: "):
        renderer("qwen3").render([USER], [tool], ToolChoice())
