"""An answer that is nothing but a call, without the tags of the model's family, is a call."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from mixedkv.engine.chat.bare_calls import BareCalls
from mixedkv.engine.chat.chat_template import ChatRenderer, ToolChoice
from mixedkv.engine.text.answer_reader import AnswerReader
from support.models.families import ADD, ARGUMENTS, WEATHER, template

pytestmark = pytest.mark.full

CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
TEXTS = [
    "It rains.",
    '{"city": "Oslo"}',
    '{"name": "get_wind", "arguments": {}}',
    '{"name": "get_weather"}',
    '{"name": "get_weather", "arguments": "Oslo"}',
    '{"name": "get_weather", "arguments": {}, "why": "rain"}',
    f"{CALL} is what I would call.",
    f"I call {CALL}",
    "```python\nprint(1)\n```",
    "```json\n[1]\n```",
    '{"name',
    CALL[:-3],
]


@cache
def reader_of(name: str = "Qwen-Qwen2.5-7B-Instruct") -> BareCalls:
    user = [{"role": "user", "content": "Rain?"}]
    chat = ChatRenderer(template(name), "", "").render(user, [WEATHER, ADD], ToolChoice())
    assert chat.prompt is not None
    return BareCalls(chat.prompt, {"get_weather", "add"})


def read(text: str, step: int) -> tuple[str, list[tuple[str, Any]], str]:
    """What was said, the calls, and what a stream had said in all its parts."""
    reader, streamed = AnswerReader(reader_of().parse), ""
    for at in range(0, len(text), step):
        streamed += "".join(part.content for part in reader.feed(text[at : at + step]))
    streamed += "".join(part.content for part in reader.feed("", last=True))
    calls = [(call.name, json.loads(call.arguments)) for call in reader.answer.complete_calls]
    return reader.answer.content, calls, streamed


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f"\n{CALL}\n",
        f"```json\n{CALL}\n```",
        f"```\n{CALL}\n```",
        CALL.replace(" ", ""),
        CALL.replace(", ", ",\n  "),
        f"<tool_call>\n{CALL}\n</tool_call>",  # with tags, as ever
    ],
)
def test_a_bare_call_is_a_call(text: str, step: int) -> None:
    said, calls, streamed = read(text, step)
    assert calls == [("get_weather", json.loads(ARGUMENTS))]
    assert said.strip() == streamed.strip() == ""


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize("text", TEXTS)
def test_all_else_is_text(text: str, step: int) -> None:
    assert read(text, step) == (text, [], text)
