"""Tools for models whose chat template has none.

A system message describes the tools, and a grammar makes the answer one JSON object: calls, or a text. In the
history, calls and texts are such objects, and results are the user's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mixedkv.constrain.constraint import SPACE
from mixedkv.constrain.constraint_text import Constraint
from mixedkv.constrain.json_schema import closed_schema
from mixedkv.engine.chat.chat_template import (
    NO_ARGUMENTS,
    Chat,
    Parser,
    RenderedChat,
    ToolChoice,
    check_sizes,
)

_CALLS, _TEXT = '{"tool_calls": [', '{"response": '
_MOST_CALLS = 8  # of one answer that may have several: a small model repeats its call
_CALL = re.compile(r'(?:, )?\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')
# llguidance writes \u for control characters only, so no character in two halves
_WHOLE_ESCAPES = re.compile(r'"(?:[^"\\]+|\\(?:u[0-9a-fA-F]{4}|[^u]))*')
_TOLD = """\
You can call tools. Answer with one JSON object and nothing else. To call tools:
{"tool_calls": [{"name": "NAME OF THE TOOL", "arguments": {ITS ARGUMENTS}}]}
To answer in words:
{"response": "YOUR ANSWER"}
The tools, and the JSON schemas of their arguments:
"""


def render(chat: Chat, plain: Callable[[Chat], RenderedChat]) -> RenderedChat:
    """Render a chat that has tools, calls or results.

    Args:
        plain: renders a chat that has none.

    Raises:
        ValueError: the tools cannot be described or called; or as `plain`.
    """
    check_sizes(chat.tools)
    tools = chat.tools if chat.choice.mode != "none" else ()
    must = chat.choice.mode == "required"
    if tools and chat.options.continues:
        raise ValueError(
            "continue_final_message: this model's chat template has no tools, so an answer that may call "
            "is one JSON object and continues no text: leave out one of both, or set tool_choice to none"
        )
    messages = [*_described(chat.messages, tools)] if tools else chat.messages
    said = replace(chat, messages=_written(messages, bool(tools)), tools=(), choice=ToolChoice())
    rendered = plain(said)
    if must and rendered.thoughts is not None:
        rendered = plain(replace(said, options=replace(chat.options, thinking=False)))
    if not tools:
        return rendered
    return replace(
        rendered,
        constraint=_constraint(tools, chat.choice),
        thoughts=None if must else rendered.thoughts,
        prompt=_Reader(rendered.prompt),
        parallel=chat.choice.parallel is True,
    )


def _described(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    """Yield messages that begin with a system message which describes the tools."""
    told = _TOLD + "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    first = messages[0] if messages and messages[0]["role"] == "system" else {"role": "system", "content": ""}
    yield {**first, "content": f"{first['content']}\n\n{told}".lstrip()}
    yield from messages[1:] if first is messages[0] else messages


def _written(messages: Sequence[Mapping[str, Any]], in_json: bool) -> list[Mapping[str, Any]]:
    """Return messages whose calls, results and, with `in_json`, answers are texts. What the user says right
    after results is part of their message, since templates may want two speakers in turn.
    """
    out: list[dict[str, Any]] = []
    texts: list[list[str]] = []  # of each: results in one message are joined once
    names: dict[str, str] = {}
    follows = False
    for message in messages:
        role, text = message["role"], message.get("content") or ""
        calls = message.get("tool_calls") or ()
        names.update((call["id"], call["function"]["name"]) for call in calls)
        if role == "tool":
            text = json.dumps(
                {"tool": names.get(message["tool_call_id"], ""), "result": text}, ensure_ascii=False
            )
        elif calls:
            text = "\n".join(filter(None, [text, _calls_text(calls)]))
        elif role == "assistant" and in_json:
            text = f"{_TEXT}{json.dumps(text, ensure_ascii=False)}}}"
        if follows and role in ("tool", "user"):
            texts[-1].append(text)
        else:
            out.append({**message, "role": "user" if role == "tool" else role})
            texts.append([text])
        follows = role == "tool"
    for message, parts in zip(out, texts, strict=True):
        message["content"] = "\n".join(parts)
    return [{name: m[name] for name in m if name not in ("tool_calls", "tool_call_id")} for m in out]


def _calls_text(calls: Sequence[Mapping[str, Any]]) -> str:
    functions = (call["function"] for call in calls)
    each = (
        f'{{"name": {json.dumps(f["name"], ensure_ascii=False)}, "arguments": {f["arguments"]}}}'
        for f in functions
    )
    return f"{_CALLS}{', '.join(each)}]}}"


def _constraint(tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> Constraint:
    """Return the constraint of an answer that calls one of the tools or, if it need not, is a text."""
    must = choice.mode == "required"
    functions = [tool["function"] for tool in tools if choice.name in ("", tool["function"]["name"])]
    more = f'(", " call){{0,{_MOST_CALLS - 1}}}' if choice.parallel is True else ""
    rules = [
        "start: calls" if must else "start: calls | answer",
        f'calls: {json.dumps(_CALLS)} call {more} "]}}"',
        "call: " + " | ".join(f"call_{i}" for i in range(len(functions))),
    ]
    if not must:
        rules.append(f'answer: {json.dumps(_TEXT)} text "}}"\ntext: %json {{"type": "string"}}')
    for i, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function["name"])}, "arguments": '
        rules.append(f'call_{i}: {json.dumps(head)} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: %json {json.dumps(_schema(function, must))}")
    return Constraint("calls", "\n".join(rules), "tools")


def _schema(function: Mapping[str, Any], must: bool) -> dict[str, Any]:
    """Return the schema of a function's arguments. One that cannot be followed is an error for a call that
    `must` be, and any object for one that may be.
    """
    try:
        schema = closed_schema(function.get("parameters") or NO_ARGUMENTS)
    except ValueError as error:
        if must:
            raise ValueError(f"tools: the parameters of {function['name']}: {error}") from None
        schema = {"type": "object"}
    return {**schema, "x-guidance": {"whitespace_pattern": SPACE}}


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads answers in JSON.

    Attributes:
        thoughts: splits off thoughts, if the model has any.
    """

    thoughts: Parser | None

    def parse(self, answer: str, partial: bool) -> str:
        """Return the message as `ChatPrompt.parse` does.

        Raises:
            ValueError: the answer is neither calls nor a text, or its calls are cut off.
        """
        message: dict[str, Any] = {"content": answer, "reasoning_content": ""}
        if self.thoughts is not None:
            message = json.loads(self.thoughts.parse(answer, partial))
        said = message["content"].lstrip()
        message |= {"content": "", "tool_calls": []}
        if said.startswith(_TEXT):
            message["content"] = _string(said[len(_TEXT) :])
        elif said.startswith(_CALLS):
            message["tool_calls"] = list(_calls(said))
            if not partial:
                json.loads(said)
        elif not (partial and any(begin.startswith(said) for begin in (_TEXT, _CALLS))):
            raise ValueError("the answer has neither tool_calls nor a response")
        return json.dumps(message)


def _string(text: str) -> str:
    """Return the string at the beginning of a JSON text, as far as it has come."""
    whole = _WHOLE_ESCAPES.match(text)
    return str(json.loads(f'{whole[0]}"')) if whole else ""


def _calls(text: str) -> Iterator[dict[str, str]]:
    """Yield calls, the last one as far as it has come."""
    at = len(_CALLS)
    while (head := _CALL.match(text, at)) is not None:
        end = _object_end(text, head.end())
        yield {"id": "", "name": json.loads(head[1]), "arguments": text[head.end() : end]}
        at = end + 1


def _object_end(text: str, at: int) -> int:
    """Return where the object at `at` ends, or the text."""
    try:
        return json.JSONDecoder().raw_decode(text, at)[1]
    except (ValueError, RecursionError):
        return len(text)
