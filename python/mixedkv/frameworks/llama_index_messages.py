"""LlamaIndex's messages in OpenAI's form, and answers in LlamaIndex's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from mixedkv.engine.text.answer_reader import Call, Part, ReadAnswer

_ONLY_TEXT = "messages: this model reads text: leave {} out, or ask `mixedkv serve --mmproj`"


class AnswerSoFar:
    """The part of an answer that has come."""

    def __init__(self) -> None:
        self._said = ReadAnswer()

    def add(self, part: Part) -> ChatResponse:
        """Take the next part, and return all that has come."""
        self._said.content += part.content
        self._said.reasoning += part.reasoning
        if part.index >= 0:
            if part.name:
                self._said.calls.append(Call(part.id, part.name))
            self._said.calls[part.index].arguments += part.arguments
        return ChatResponse(message=answer_message(self._said), delta=part.content)


def openai_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return LlamaIndex's messages in OpenAI's form.

    Raises:
        ValueError: one has more than text.
    """
    return [_openai(message) for message in messages]


def _openai(message: ChatMessage) -> dict[str, Any]:
    known = TextBlock | ThinkingBlock | ToolCallBlock
    if other := next((block for block in message.blocks if not isinstance(block, known)), None):
        raise ValueError(_ONLY_TEXT.format(repr(other.block_type)))
    out: dict[str, Any] = {"role": message.role.value, "content": message.content or ""}
    if "tool_call_id" in message.additional_kwargs:
        out["tool_call_id"] = message.additional_kwargs["tool_call_id"]
    thoughts = [block.content or "" for block in message.blocks if isinstance(block, ThinkingBlock)]
    if thoughts:
        out["reasoning_content"] = "".join(thoughts)
    calls = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    if calls:
        out["tool_calls"] = [_call(block) for block in calls]
    return out


def _call(block: ToolCallBlock) -> dict[str, Any]:
    given = block.tool_kwargs
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    function = {"name": block.tool_name, "arguments": arguments}
    return {"id": block.tool_call_id or "", "type": "function", "function": function}


def answer_message(said: ReadAnswer) -> ChatMessage:
    """Return an answer as LlamaIndex has it: thoughts, text and calls are blocks."""
    blocks: list[Any] = [ThinkingBlock(content=said.reasoning)] if said.reasoning else []
    if said.content or not said.calls:
        blocks.append(TextBlock(text=said.content))
    for call in said.calls:
        arguments = _arguments(call.arguments)
        blocks.append(ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=arguments))
    return ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks)


def _arguments(text: str) -> dict[str, Any] | str:
    """Return the arguments of a call; of one that is not whole, their text."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, dict) else text
