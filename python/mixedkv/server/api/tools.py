"""Checks the tools of a chat and its calls, and writes calls in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mixedkv.engine.chat.chat_template import ToolChoice, check_depth
from mixedkv.engine.text.answer_reader import Call, Part
from mixedkv.server.api.chat_message import Message
from mixedkv.server.api.schemas import ChatRequest, NamedTool, Tool
from mixedkv.server.api_error import ApiError, bad_request


def choice_of(body: ChatRequest) -> ToolChoice:
    """Return the tool choice of a request.

    Raises:
        ApiError: 400, calls conflict with other fields.
    """
    wanted = body.tool_choice
    if isinstance(wanted, NamedTool):
        choice = ToolChoice(mode="required", name=wanted.function.name, parallel=False)
    else:
        choice = ToolChoice(mode=wanted or "auto", parallel=body.parallel_tool_calls)
    if not body.tools or choice.mode == "none":
        return choice
    formats = {"response_format": body.response_format, "grammar": body.grammar, "regex": body.regex}
    for name, value in formats.items():
        if value is not None and getattr(value, "type", "") != "text":
            raise bad_request(
                f"{name} and tools both say what the answer looks like: leave one out, or set "
                "tool_choice to none",
                name,
            )
    return choice


def checked_tools(tools: Sequence[Tool], choice: ToolChoice) -> list[dict[str, Any]]:
    """Return tools in the form that templates expect.

    Raises:
        ApiError: 400, two tools have one name, a schema is invalid, or the chosen tool is missing.
    """
    names: set[str] = set()
    for i, tool in enumerate(tools):
        name, where = tool.function.name, f"tools[{i}].function"
        if name in names:
            raise bad_request(f"{where}.name: there are two tools {name!r}: rename one", "tools")
        names.add(name)
        if tool.function.parameters:
            _check_parameters(tool.function.parameters, f"{where}.parameters")
    if choice.name and choice.name not in names:
        raise bad_request(f"tool_choice: there is no tool {choice.name!r} in tools", "tool_choice")
    return [tool.model_dump(exclude_none=True) for tool in tools]


def _check_parameters(schema: dict[str, Any], where: str) -> None:
    """Check parameters as far as templates and parsers use them. A forced call checks all of them."""
    try:
        check_depth(schema, where)
        json.dumps(schema, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except ValueError as error:
        message = str(error) if where in str(error) else f"{where}: {error}"
        raise bad_request(message, "tools") from None
    if schema.get("type") != "object":
        raise bad_request(f'{where}: arguments are an object: give it "type": "object"', "tools")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not all(isinstance(v, dict | bool) for v in properties.values()):
        raise bad_request(f"{where}.properties: give an object of schemas", "tools")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise bad_request(f"{where}.required: give a list of names", "tools")


def check_calls(messages: Sequence[Message]) -> None:
    """Check that each result answers an earlier call, once.

    Raises:
        ApiError: 400.
    """
    open_calls: set[str] = set()
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if message.tool_calls and message.role != "assistant":
            raise _wrong(f"{where}.tool_calls: only assistants call: leave them out")
        if message.tool_call_id and message.role != "tool":
            raise _wrong(f"{where}.tool_call_id goes with role tool only: leave it out")
        if message.role == "tool":
            if not message.tool_call_id:
                raise _wrong(f"{where}.tool_call_id is missing: give the id of the call it answers")
            if message.tool_call_id not in open_calls:
                raise _wrong(
                    f"{where}.tool_call_id: no assistant message before it has an unanswered call "
                    f"{message.tool_call_id!r}: send the message that called, with its tool_calls"
                )
            open_calls.remove(message.tool_call_id)
        for j, call in enumerate(message.tool_calls or ()):
            name = f"{where}.tool_calls[{j}]"
            if call.id in open_calls:
                raise _wrong(f"{name}.id: {call.id!r} is another call's: give each its own")
            open_calls.add(call.id)
            _check_arguments(call.function.arguments, f"{name}.function.arguments")


def _check_arguments(text: str, where: str) -> None:
    """Check a call's arguments, which templates use."""
    try:
        arguments = json.loads(text)
    except RecursionError:
        raise _wrong(f"{where}: nested too deep: make it flatter") from None
    except ValueError as error:
        raise _wrong(
            f"{where}: no JSON ({error}): leave a call out that was cut off, and its result"
        ) from None
    try:
        check_depth(arguments, where)
    except ValueError as error:
        raise _wrong(str(error)) from None


def _wrong(message: str) -> ApiError:
    return bad_request(message, "messages")


def call_json(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def delta(part: Part) -> dict[str, Any]:
    """Return the delta of a stream for a part of an answer."""
    if part.index < 0:
        return {"reasoning_content": part.reasoning} if part.reasoning else {"content": part.content}
    if not part.name:
        return {"tool_calls": [{"index": part.index, "function": {"arguments": part.arguments}}]}
    return {"tool_calls": [{"index": part.index, **call_json(Call(part.id, part.name, part.arguments))}]}
