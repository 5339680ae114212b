"""Tools for chat templates that have none: what the prompt says, what may be answered, how it is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mixedkv.constrain.constraint import ConstraintCompiler
from mixedkv.engine.chat import generic_tools
from mixedkv.engine.chat.chat_template import Chat, ChatRenderer, RenderedChat, TemplateOptions, ToolChoice
from support.models.families import ADD, ARGUMENTS, WEATHER, template

pytestmark = pytest.mark.core

USER = {"role": "user", "content": "Will it rain in Oslo?"}
END = 256
BYTES = ConstraintCompiler.of_tokens([*(bytes([i]) for i in range(256)), b"\xff<end>"], [END])
CALL = f'{{"tool_calls": [{{"name": "get_weather", "arguments": {ARGUMENTS}}}]}}'
TEXT = r'{"response": "It \"rains\".\n\u001fé😀"}'
SAID = 'It "rains".\n\x1fé😀'
GEMMA = ChatRenderer(template("google-gemma-2-2b-it"), "<s>", "</s>")


def plain(chat: Chat) -> RenderedChat:
    return GEMMA.render(chat.messages, chat.tools, chat.choice, chat.options)


def render(
    messages: Any = (USER,), mode: str = "auto", tools: Any = (WEATHER, ADD), **choice: Any
) -> RenderedChat:
    return generic_tools.render(
        Chat(messages=messages, tools=tools, choice=ToolChoice(mode=mode, **choice)), plain
    )


def follows(rendered: RenderedChat, text: str) -> bool:
    assert rendered.constraint is not None
    matcher = BYTES.compile(rendered.constraint)
    return matcher.follow(text.encode()) and END in matcher.allowed().tolist()


def test_the_prompt_describes_the_tools() -> None:
    text = render().text
    assert text.count("get_weather") == 1
    assert "The weather of a city." in text
    assert text.index('"add"') < text.index("Will it rain")


@pytest.mark.parametrize(
    ("mode", "text", "allowed"),
    [
        ("auto", CALL, True),
        ("auto", TEXT, True),
        ("auto", "It rains.", False),
        ("required", CALL, True),
        ("required", TEXT, False),
        ("required", CALL.replace("3", "30"), False),
        ("required", CALL.replace("get_weather", "guess"), False),
    ],
)
def test_an_answer_is_calls_or_a_text(mode: str, text: str, allowed: bool) -> None:
    assert follows(render(mode=mode), text) is allowed


@pytest.mark.parametrize("parallel", [False, None, True])
def test_one_call_or_several(parallel: bool | None) -> None:
    several = CALL.replace("}]}", '}, {"name": "add", "arguments": {"a": 1, "b": 2}}]}')
    rendered = render(mode="required", parallel=parallel)
    assert follows(rendered, several) is (parallel is True)
    reader = rendered.reader()
    reader.feed(several, last=True)
    assert [call.name for call in reader.answer.complete_calls] == ["get_weather", "add"][
        : 1 + (parallel is True)
    ]


def test_only_the_named_function_can_be_called() -> None:
    rendered = render(mode="required", name="add", parallel=False)
    assert "get_weather" in rendered.text
    assert not follows(rendered, CALL)


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_a_text_is_read_while_it_comes(size: int) -> None:
    reader = render().reader()
    parts = [part for at in range(0, len(TEXT), size) for part in reader.feed(TEXT[at : at + size])]
    parts += reader.feed("", last=True)
    assert "".join(part.content for part in parts) == SAID == reader.answer.content
    assert reader.answer.finish_reason("stop") == "stop"
    assert size > 5 or len(parts) > 3


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_call_is_read_while_it_comes(size: int) -> None:
    reader = render().reader()
    parts = [part for at in range(0, len(CALL), size) for part in reader.feed(CALL[at : at + size])]
    parts += reader.feed("", last=True)
    assert [part.name for part in parts if part.name] == ["get_weather"]
    assert parts[0].id
    assert "".join(part.arguments for part in parts) == ARGUMENTS
    assert not any(part.content for part in parts)
    assert reader.answer.finish_reason("stop") == "tool_calls"


@pytest.mark.parametrize("cut", range(len(CALL)))
def test_a_call_that_is_cut_off_is_nobodys_to_run(cut: int) -> None:
    reader = render().reader()
    reader.feed(CALL[:cut], last=True)
    complete = cut > CALL.index(ARGUMENTS) + len(ARGUMENTS) - 1
    assert len(reader.answer.complete_calls) == complete


@pytest.mark.parametrize("cut", range(len('{"response": '), len(TEXT)))
def test_a_text_that_is_cut_off_is_what_was_said(cut: int) -> None:
    whole, pieces = render().reader(), render().reader()
    whole.feed(TEXT[:cut], last=True)
    for letter in TEXT[:cut]:
        pieces.feed(letter)
    pieces.feed("", last=True)
    assert SAID.startswith(whole.answer.content)
    assert pieces.answer.content == whole.answer.content


def test_calls_and_results_are_texts_of_the_history() -> None:
    called = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [called, {**called, "id": "2"}]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "tool", "tool_call_id": "2", "content": "snow"},
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": "Both."},
        {"role": "user", "content": "Again?"},
    ]
    text = render(messages).text
    assert text.count("<start_of_turn>user") == 3, "the template wants two speakers in turn"
    at = [text.index(part) for part in ("Be brief.", ARGUMENTS, '"result": "rain"', "snow", "So?", "Both.")]
    assert at == sorted(at)
    assert '{"response": "Both."}' in text
    without = render(messages, tools=())
    assert ARGUMENTS in without.text
    assert "\nBoth.<" in without.text
    assert without.constraint is None


def test_no_call_is_wanted() -> None:
    rendered = render(mode="none")
    assert rendered.constraint is None
    assert "get_weather" not in rendered.text
    reader = rendered.reader()
    reader.feed(CALL, last=True)
    assert (reader.answer.content, reader.answer.calls) == (CALL, [])


def test_a_schema_that_is_not_followed_is_an_error_where_a_call_is_forced() -> None:
    parameters = {"type": "object", "properties": {"all": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "sort", "parameters": parameters}}
    assert follows(render(tools=[tool]), '{"tool_calls": [{"name": "sort", "arguments": {"any": 1}}]}')
    with pytest.raises(ValueError, match=r"^tools: the parameters of sort: .*uniqueItems"):
        render(mode="required", tools=[tool])


def test_names_and_references_stay_those_of_their_tool() -> None:
    parameters = {
        "type": "object",
        "properties": {"when": {"$ref": "#/$defs/day"}},
        "required": ["when"],
        "$defs": {"day": {"enum": ["today"]}},
    }
    tool = {"type": "function", "function": {"name": 'say "so"', "parameters": parameters}}
    answer = {"tool_calls": [{"name": 'say "so"', "arguments": {"when": "today"}}]}
    rendered = render(mode="required", tools=[tool, ADD])
    assert follows(rendered, json.dumps(answer))
    reader = rendered.reader()
    reader.feed(json.dumps(answer), last=True)
    assert reader.answer.complete_calls[0].name == 'say "so"'


def test_an_answer_that_has_begun_has_no_tools() -> None:
    begun = Chat(
        messages=[USER, {"role": "assistant", "content": "It"}],
        tools=[WEATHER],
        options=TemplateOptions(continues=True),
    )
    with pytest.raises(ValueError, match=r"^continue_final_message: .*leave out one"):
        generic_tools.render(begun, plain)


def test_thoughts_come_before_the_answer() -> None:
    thinking = ChatRenderer(template("Qwen-Qwen3-0.6B"), "<s>", "</s>")

    def thinks(chat: Chat) -> RenderedChat:
        return thinking.render(chat.messages, chat.tools, chat.choice, chat.options)

    chat = Chat(messages=[USER], tools=[WEATHER])
    rendered = generic_tools.render(chat, thinks)
    assert rendered.thoughts is not None
    reader = rendered.reader()
    text = f"<think>\nRain?\n</think>\n\n{CALL}"
    for at in range(0, len(text), 3):
        reader.feed(text[at : at + 3])
    reader.feed("", last=True)
    assert reader.answer.reasoning.strip() == "Rain?"
    assert reader.answer.content == ""
    assert [call.arguments for call in reader.answer.complete_calls] == [ARGUMENTS]
