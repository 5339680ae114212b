"""Calls of each family of models: read from what it writes, whole and piece by piece, and forced."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from mixedkv.constrain.constraint import ConstraintCompiler
from mixedkv.engine.chat.chat_template import ChatRenderer, RenderedChat, ToolChoice
from mixedkv.engine.text.answer_reader import AnswerReader
from mixedkv.limits import check_depth
from support.models.families import ADD, ARGUMENTS, CALLS, WEATHER, template

pytestmark = pytest.mark.core

USER = {"role": "user", "content": "Will it rain in Oslo?"}
END = 256
BYTES = ConstraintCompiler.of_tokens([*(bytes([i]) for i in range(256)), b"\xff<end>"], [END])


@cache
def family(name: str) -> ChatRenderer:
    return ChatRenderer(template(name), "<s>", "</s>")


def render(family_name: str, mode: str = "auto", tools: Any = (WEATHER, ADD), **choice: Any) -> RenderedChat:
    return family(family_name).render([USER], tools, ToolChoice(mode=mode, **choice))


def read_in_pieces(reader: AnswerReader, text: str, size: int) -> list[Any]:
    parts = []
    for at in range(0, len(text), size):
        parts += reader.feed(text[at : at + size])
    return [*parts, *reader.feed("", last=True)]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_read(name: str) -> None:
    reader = render(name).reader()
    reader.feed(CALLS[name], last=True)
    (call,) = reader.answer.calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", json.loads(ARGUMENTS))
    assert call.id
    assert reader.answer.content.strip() == ""


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_read_while_it_comes(name: str, size: int) -> None:
    parts = [p for p in read_in_pieces(render(name).reader(), CALLS[name], size) if p.index >= 0]
    assert {part.index for part in parts} == {0}
    assert [part.name for part in parts if part.name] == ["get_weather"], "whole, and first of all"
    assert parts[0].name
    assert parts[0].id
    assert json.loads("".join(part.arguments for part in parts)) == json.loads(ARGUMENTS)


@pytest.mark.parametrize("name", CALLS)
def test_a_text_without_a_call_is_text(name: str) -> None:
    prompt = render(name)
    text = said = "It will <b>rain</b> {today}."
    if name.endswith("v3.2") and "functionary" in name:  # it names who is spoken to
        text = f"all\n{said}"
    elif name == "openai-gpt-oss-120b":
        text = f"<|channel|>final<|message|>{said}"
    elif prompt.prompt.opening.rstrip().endswith("<think>"):
        text = f"Rain.</think>{said}"
    reader = prompt.reader()
    parts = read_in_pieces(reader, text, 5)
    assert reader.answer.calls == []
    assert "".join(part.content for part in parts).strip() == said


@pytest.mark.parametrize("name", CALLS)
def test_a_forced_call_can_be_what_the_family_writes(name: str) -> None:
    prompt = render(name, "required", parallel=False)
    assert prompt.constraint is not None
    text = CALLS[name].removeprefix("Rain, then.").encode()
    matcher = BYTES.compile(prompt.constraint)
    for i, byte in enumerate(text):
        assert matcher.allows(byte), (text[:i], text[i:])
        matcher.accept(byte)


@pytest.mark.parametrize("name", [name for name in CALLS if ARGUMENTS in CALLS[name]])
def test_forced_arguments_follow_the_schema(name: str) -> None:
    prompt = render(name, "required", parallel=False)
    assert prompt.constraint is not None
    text = CALLS[name].removeprefix("Rain, then.").encode()
    matcher = BYTES.compile(prompt.constraint)
    at = text.index(b'"days": 3') + len(b'"days": ')
    for byte in text[:at]:
        matcher.accept(byte)
    digits = {chr(token) for token in matcher.allowed() if chr(token) in '-0123456789"'}
    assert digits == set("123456789")


def test_the_number_of_a_forced_call_ends() -> None:
    prompt = render("mistralai-Mistral-Nemo-Instruct-2407", "required", [ADD], parallel=False)
    assert prompt.constraint is not None
    for begin, most in (("1", 19), ("0.", 20), ("0e-", 3)):
        matcher = BYTES.compile(prompt.constraint)
        for byte in f'[TOOL_CALLS][{{"name": "add", "arguments": {{"a": 1, "b": 2}}, "id": {begin}'.encode():
            matcher.accept(byte)
        for _ in range(most):
            matcher.accept(ord("9"))
        assert not matcher.allows(ord("9")), begin
        assert matcher.allows(ord("}")), begin


@pytest.mark.parametrize("names", [("Joke",), ("joke", "Joke"), ("start", "Root")])
def test_arguments_follow_the_schema_whatever_a_function_is_called(names: tuple[str, ...]) -> None:
    tools = [{"type": "function", "function": {**ADD["function"], "name": name}} for name in names]
    prompt = render("Qwen-Qwen2.5-7B-Instruct", "required", tools, parallel=False)
    assert prompt.constraint is not None
    for name in names:
        matcher = BYTES.compile(prompt.constraint)
        for byte in f'<tool_call>\n{{"name": "{name}", "arguments": '.encode():
            assert matcher.allows(byte), name
            matcher.accept(byte)
        assert matcher.allowed().tolist() == [ord("{")], name


def test_only_the_named_function_can_be_forced() -> None:
    prompt = render("Qwen-Qwen2.5-7B-Instruct", "required", name="add", parallel=False)
    assert prompt.constraint is not None
    assert "get_weather" in prompt.text
    matcher = BYTES.compile(prompt.constraint)
    for byte in b'<tool_call>\n{"name": "':
        matcher.accept(byte)
    assert matcher.allowed().tolist() == [ord("a")]


@pytest.mark.parametrize("parallel", [False, True])
def test_one_call_or_several(parallel: bool) -> None:
    prompt = render("Qwen-Qwen2.5-7B-Instruct", "required", parallel=parallel)
    assert prompt.constraint is not None
    matcher = BYTES.compile(prompt.constraint)
    call = CALLS["Qwen-Qwen2.5-7B-Instruct"]
    for byte in call.encode():
        matcher.accept(byte)
    assert END in matcher.allowed().tolist()
    assert matcher.allows(ord("<")) == parallel
    reader = prompt.reader()
    reader.feed(f"{call}\n{call}", last=True)
    assert len(reader.answer.calls) == 1 + parallel


def test_a_control_token_stands_for_its_text_in_a_call() -> None:
    prompt = render("mistralai-Mistral-Nemo-Instruct-2407", "required", parallel=False)
    assert prompt.constraint is not None
    tokens = [*(bytes([i]) for i in range(256)), b"\xff<end>", b"\xff[TOOL_CALLS]", b"\xff[INST]"]
    matcher = ConstraintCompiler.of_tokens(tokens, [END]).compile(prompt.constraint)
    assert matcher.allowed().tolist() == [ord("["), END + 1]
    matcher.accept(END + 1)
    for byte in CALLS["mistralai-Mistral-Nemo-Instruct-2407"].removeprefix("[TOOL_CALLS]").encode():
        assert matcher.allows(byte)
        matcher.accept(byte)


def test_many_tools_can_be_forced() -> None:
    functions = [{**WEATHER["function"], "name": f"tool_{i}"} for i in range(128)]
    tools = [{"type": "function", "function": function} for function in functions]
    prompt = render("Qwen-Qwen2.5-7B-Instruct", "required", tools[:32])
    assert prompt.constraint is not None
    BYTES.compile(prompt.constraint)
    with pytest.raises(ValueError, match=r"^tools: .*name it in tool_choice"):
        render("Qwen-Qwen2.5-7B-Instruct", "required", tools)


def test_a_schema_that_is_not_followed_is_an_error_where_a_call_is_forced() -> None:
    parameters = {"type": "object", "properties": {"all": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "sort", "parameters": parameters}}
    render("Qwen-Qwen2.5-7B-Instruct", "auto", [tool])
    with pytest.raises(ValueError, match=r"^tools: the parameters of sort: .*uniqueItems"):
        render("Qwen-Qwen2.5-7B-Instruct", "required", [tool])


def test_tools_stay_in_the_prompt_where_no_call_is_wanted() -> None:
    none, auto = render("Qwen-Qwen2.5-7B-Instruct", "none"), render("Qwen-Qwen2.5-7B-Instruct")
    assert none.text == auto.text
    reader = none.reader()
    reader.feed(CALLS["Qwen-Qwen2.5-7B-Instruct"], last=True)
    assert reader.answer.calls == []


def test_thoughts_are_split_off() -> None:
    reader = render("Qwen-Qwen3-0.6B").reader()
    text = "<think>\nRain?\n</think>\n\n" + CALLS["Qwen-Qwen3-0.6B"]
    parts = read_in_pieces(reader, text, 4)
    assert reader.answer.reasoning.strip() == "Rain?"
    assert "".join(part.reasoning for part in parts) == reader.answer.reasoning
    assert reader.answer.content.strip() == ""
    assert len(reader.answer.calls) == 1


def test_a_long_answer_is_not_read_at_every_token() -> None:
    prompt = render("Qwen-Qwen2.5-7B-Instruct")
    lengths: list[int] = []

    def parse(text: str, partial: bool) -> str:
        lengths.append(len(text))
        return prompt.prompt.parse(text, partial)

    reader = AnswerReader(parse)
    parts = read_in_pieces(reader, "It rains. " * 5000, 5)
    assert "".join(part.content for part in parts) == "It rains. " * 5000
    assert sum(lengths) < 100 * 50_000, "it would be 5,000 times without a limit"


def test_an_answer_that_is_cut_off_has_the_calls_so_far() -> None:
    reader = render("Qwen-Qwen2.5-7B-Instruct").reader()
    read_in_pieces(reader, CALLS["Qwen-Qwen2.5-7B-Instruct"][:70], 6)
    (call,) = reader.answer.calls
    assert call.name == "get_weather"
    assert ARGUMENTS.startswith(call.arguments)


@pytest.mark.parametrize("bracket", ["[", '{"a":'])
def test_an_answer_that_nests_without_end_is_a_call_that_was_cut_off(bracket: str) -> None:
    text = '<tool_call>\n{"name": "get_weather", "arguments": ' + bracket * 100_000
    reader = render("Qwen-Qwen2.5-7B-Instruct").reader()
    reader.feed(text, last=True)
    (call,) = reader.answer.calls
    assert call.name == "get_weather"
    assert not call.complete
    assert reader.answer.finish_reason("stop") == "length"


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}{{ tools }}",
        "{{ " + "(" * 30_000 + "1" + ")" * 30_000 + " }}",
        "{{ " + "not " * 15_000 + "1 }}",
        "{{ messages" + "|first" * 10_000 + " }}",
        "{{ messages" + "[0]" * 20_000 + " }}",
        "{% if 1 %}" * 6000,
        "{{ 1 " + "+ 1 " * 16_000 + " }}",
        "{{ 1 " + "~ 1 " * 16_000 + " }}",
        "x" * 70_000,
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_made_to_harm_is_an_error(source: str) -> None:
    with pytest.raises(ValueError, match=r"^(tools|messages): "):
        ChatRenderer(source, "", "").render([USER], [WEATHER], ToolChoice())


def test_a_template_of_many_choices_is_rendered() -> None:
    renderer = ChatRenderer("{{ 1 " + "if 1 else 1 " * 5000 + " }}", "", "")
    assert renderer.render([USER], [], ToolChoice()).text == "1"


@pytest.mark.parametrize("name", ["google-gemma-2-2b-it", "microsoft-Phi-3.5-mini-instruct"])
def test_a_template_without_tools_is_known(name: str) -> None:
    assert not family(name).takes_tools


@pytest.mark.parametrize(
    "printed",
    [
        """{{- '", "arguments": ' + tool_call.arguments + '}\\n</tool_call>' }}""",
        """{{- '", "arguments": ' ~ tool_call['arguments'] ~ '}\\n</tool_call>' }}""",
        """{{- '", "arguments": ' }}{{- tool_call.arguments }}{{- '}\\n</tool_call>' }}""",
    ],
)
def test_a_template_that_prints_arguments_as_they_are_has_tools(printed: str) -> None:
    source = template("Qwen-Qwen2.5-7B-Instruct")
    begin, end = (
        source.index("""{{- '", "arguments": ' }}"""),
        source.rindex("{%- endfor %}\n        {{- '<|im_e"),
    )
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    messages: list[Any] = [USER, called, {**USER, "content": "So?"}]
    prompts = [
        ChatRenderer(each, "<s>", "</s>").render(messages, [ADD], ToolChoice())
        for each in (source, source[:begin] + printed + source[end:])
    ]
    assert prompts[0].text == prompts[1].text
    assert '"arguments": {"a": 1, "b": 2}}\n</tool_call>' in prompts[1].text
    assert prompts[0].constraint == prompts[1].constraint is not None


def test_depth_is_bounded() -> None:
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(ValueError, match=r"^here: nested deeper than 64"):
        check_depth(deep, "here")
    check_depth(deep[0] and {"a": [1, {"b": 2}]}, "here")
