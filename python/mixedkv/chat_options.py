"""Options of `create_chat_completion` that llama-cpp-python accepts and ignores: here they are honoured, or
refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import llama_cpp

from mixedkv.native.llama_arguments import check_messages, checked_kinds

_CHAT = inspect.signature(llama_cpp.Llama.create_chat_completion)
_FORMATS = ("text", "json_object", "json_schema")


def chat_arguments(
    llm: Any, messages: Any, args: tuple[Any, ...], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Check a call of `create_chat_completion`, and return all its arguments behind the messages, by name.

    A JSON schema in `response_format` becomes a logits processor of this answer, as an engine has it; a
    required call of the one tool there is becomes that tool's.

    Raises:
        ValueError: a message, a format or a choice of a tool is not known, or cannot be had here.
        TypeError: an argument is given twice or of another type, or there is none of its name.
    """
    check_messages(messages)
    options = dict(_CHAT.bind(llm, messages, *args, **given).arguments)
    del options["self"], options["messages"]
    options = checked_kinds(options)
    if options.get("response_format") is not None:
        _take_format(llm, options)
    if (choice := options.get("tool_choice")) is not None:
        options["tool_choice"] = _choice(choice, options.get("tools") or [])
        if isinstance(options["tool_choice"], Mapping):
            _take_tool(llm, options)
    return options


def _take_format(llm: Any, options: dict[str, Any]) -> None:
    requested = options["response_format"]
    kind = requested.get("type")
    if kind not in _FORMATS:
        raise ValueError(f"response_format: type={kind!r:.80} is none of {', '.join(_FORMATS)}")
    if kind == "text" or (kind == "json_object" and "schema" not in requested):
        return
    schema = requested.get("schema")
    if kind == "json_schema":
        inner = requested.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, Mapping) else schema
    if not isinstance(schema, Mapping):
        raise ValueError(
            'response_format: there is no schema: write {"type": "json_schema", "json_schema": '
            '{"schema": {...}}}'
        )
    if options.get("grammar") is not None:
        raise ValueError("response_format and grammar both constrain the answer: give one of them")
    _add_schema(llm, options, schema, "response_format")
    options["response_format"] = None


def _take_tool(llm: Any, options: dict[str, Any]) -> None:
    """Hold the arguments of a call to all of the tool's schema: the base class keeps to a part of it."""
    name = _function("tool_choice", options["tool_choice"])["name"]
    functions = [_function("tools", tool) for tool in options.get("tools") or ()]
    named = [function for function in functions if function["name"] == name]
    if not named:
        raise ValueError(f"tool_choice: there is no tool {name!r:.80} in tools")
    own_handler = llm.chat_handler is not None or (llm.chat_format or "").startswith("functionary")
    if isinstance(named[0].get("parameters"), Mapping) and not own_handler:
        _add_schema(llm, options, named[0]["parameters"], "tools")


def _add_schema(llm: Any, options: dict[str, Any], schema: Mapping[str, Any], field: str) -> None:
    from mixedkv.constrain.constraint import constrain  # takes a while to import

    own = constrain(llm, "json_schema", dict(schema), field)
    options["logits_processor"] = llama_cpp.LogitsProcessorList(
        [*own, *(options.get("logits_processor") or ())]
    )


def _choice(choice: Any, tools: list[Any]) -> Any:
    if isinstance(choice, Mapping) or choice in ("none", "auto"):
        return choice
    if choice != "required":
        raise ValueError(
            f'tool_choice={choice!r:.80}: use "auto", "none", "required", or '
            '{"type": "function", "function": {"name": NAME}}'
        )
    if len(tools) != 1:
        raise ValueError(
            f'tool_choice="required" with {len(tools)} tools: a Llama can be made to call one: name it with '
            '{"type": "function", "function": {"name": NAME}}. An Engine lets the model choose: '
            'engine.submit(Chat(messages, tools=tools, choice=ToolChoice(mode="required")))'
        )
    return {"type": "function", "function": {"name": _function("tools", tools[0])["name"]}}


def _function(field: str, given: Any) -> Mapping[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
        raise ValueError(
            f'{field}: {given!r:.80} is not {{"type": "function", "function": {{"name": NAME}}}}'
        )
    return function
