"""Chats with tools and thoughts, answered by the engine itself, without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.engine import Chat, Engine, ToolChoice
from mixedkv.engine.chat.tokenizer import Tokenizer

pytestmark = pytest.mark.full

TEMPLATE = Path(__file__).parents[1] / "support" / "models" / "templates" / "qwen3.jinja"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
MESSAGES = [{"role": "user", "content": "How is the weather in Oslo?"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    llm = Llama(str(model_path()), n_ctx=2048, n_seq_max=4, kv_unified=True, n_threads=1, verbose=False)
    tokenizer = Tokenizer(llm, chat_template=TEMPLATE.read_text(encoding="utf-8"))
    with Engine(llm, tokenizer=tokenizer) as engine:
        yield engine
    llm.close()


def test_a_call_that_is_asked_for_is_one_of_the_tools(engine: Engine) -> None:
    chat = Chat(messages=MESSAGES, tools=[WEATHER], choice=ToolChoice(mode="required", parallel=False))
    answers = [engine.submit(chat, max_tokens=200, seed=seed) for seed in range(3)]
    for answer in answers:
        (call,) = answer.message.calls
        assert call.name == "weather"
        assert json.loads(call.arguments).keys() == {"city", "days"}
        assert answer.message.content == ""


def test_a_thought_is_not_what_is_said(engine: Engine) -> None:
    answer = engine.submit(Chat(messages=MESSAGES), max_tokens=40, seed=1)
    said = answer.message
    assert answer.job.answer.thought is not None
    assert "<think>" not in said.content + said.reasoning
    plain = engine.submit("What is missing?", max_tokens=8, temperature=0)
    assert plain.message.content == plain.text


def test_parts_come_one_by_one_and_are_the_message(engine: Engine) -> None:
    chat = Chat(messages=MESSAGES, tools=[WEATHER], choice=ToolChoice(mode="required", parallel=False))
    answer = engine.submit(chat, max_tokens=200, seed=1)
    parts = list(answer.parts())
    (call,) = answer.message.calls
    assert len(parts) > 1
    assert (parts[0].name, "".join(part.arguments for part in parts)) == (call.name, call.arguments)

    async def contents() -> str:
        again = engine.submit(Chat(messages=MESSAGES), max_tokens=20, seed=1)
        text = "".join([part.content + part.reasoning async for part in again.aparts()])
        assert text == again.message.content + again.message.reasoning
        return text

    assert asyncio.run(contents())


def test_who_cancels_says_why(engine: Engine) -> None:
    answer = engine.submit(Chat(messages=MESSAGES), max_tokens=1500)
    answer.cancel(TimeoutError("too late"))
    with pytest.raises(TimeoutError, match="too late"):
        answer.result()
