"""Chats with tools, by llama.cpp's own chat layer: it knows how each family of models is told of tools, and
how it writes calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mixedkv import _chat
from mixedkv.engine.constraint import SPACE, Constraint
from mixedkv.engine.tool_grammar import tool_grammar
from mixedkv.engine.tool_reader import ToolReader

_MAX_TEMPLATE = 1 << 16  # characters: llama.cpp takes a chain of filters apart by recursion
_MAX_DEPTH = 64  # of objects and lists in a schema or in arguments
_PROBE = "a_name_that_no_template_has"
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, kw_only=True)
class ToolChoice:
    """What the answer may be.

    Attributes:
        mode: "none" only text, "auto" the model's choice, "required" at least one call.
        name: the only function to call; with "required".
        parallel: more than one call.
    """

    mode: str = "auto"
    name: str = ""
    parallel: bool = True


@dataclass(frozen=True, kw_only=True)
class ToolPrompt:
    """A rendered chat.

    Attributes:
        constraint: of an answer that must call.
        stops: strings that end the answer.
        shown: control tokens that are part of its text.
    """

    text: str
    constraint: Constraint | None
    stops: tuple[str, ...]
    shown: tuple[str, ...]
    prompt: _chat.ChatPrompt
    parallel: bool

    def reader(self) -> ToolReader:
        """Of one answer."""
        return ToolReader(self.prompt.parse, parallel=self.parallel)


class ToolTemplate:
    """A model's chat template, for messages with tools.

    Args:
        source: its Jinja text; "" for none.
    """

    def __init__(self, source: str, bos: str, eos: str) -> None:
        self._source, self._bos, self._eos = source, bos, eos

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], choice: ToolChoice
    ) -> ToolPrompt:
        """
        Args:
            messages, tools: in OpenAI's form.

        Raises:
            ValueError: the model cannot be told of tools, or its template refuses the messages; the message
                begins with the field.
        """
        if tools and self._template and not self._takes_tools:
            raise ValueError(
                "tools: the chat template of this model has none: leave them out, or serve the model with a "
                "chat_template that has"
            )
        must = choice.mode == "required"
        prompt = self._apply(messages, tools, choice, thinking=not must)
        reading, constraint = prompt, None
        if must:
            callable_ = [tool for tool in tools if choice.name in ("", tool["function"]["name"])]
            reading = self._apply(messages, callable_, choice, thinking=False)
            constraint = _calls_only(reading, callable_, choice.parallel)
        elif not tools or choice.mode == "none":
            reading = self._apply(messages, [], choice)
        return ToolPrompt(
            text=prompt.prompt,
            constraint=constraint,
            stops=tuple(reading.stops),
            shown=tuple(reading.preserved) if tools else (),
            prompt=reading,
            parallel=choice.parallel,
        )

    @cached_property
    def _template(self) -> _chat.ChatTemplate:
        if not self._source:
            raise ValueError("tools: this model has no chat template: serve it with chat_template")
        if len(self._source) > _MAX_TEMPLATE:
            raise ValueError(f"tools: the model's chat template has more than {_MAX_TEMPLATE} characters")
        try:
            return _chat.ChatTemplate(self._source, self._bos, self._eos)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"tools: the model's chat template cannot be read: {_short(error)}") from None

    @cached_property
    def _takes_tools(self) -> bool:
        """Whether a tool appears in a prompt, and calls can be read: some families are known by name only."""
        tools = [{"type": "function", "function": {"name": _PROBE, "parameters": _NO_ARGUMENTS}}]
        try:
            prompt = self._apply([{"role": "user", "content": "?"}], tools, ToolChoice(mode="required"))
        except ValueError:
            return False
        return _PROBE in prompt.prompt and bool(prompt.grammar)

    def _apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        choice: ToolChoice,
        thinking: bool = True,
    ) -> _chat.ChatPrompt:
        template = self._template
        try:
            return template.apply(
                json.dumps(messages), json.dumps(tools), choice.mode, choice.parallel, thinking
            )
        except (RuntimeError, ValueError) as error:  # templates are programs of the model's file
            raise ValueError(f"messages: the model's chat template refuses them: {_short(error)}") from None


def check_depth(value: Any, name: str) -> None:
    """
    Raises:
        ValueError: objects or lists that are nested too deep: templates go through them by recursion.
    """
    todo = [(value, 0)]
    while todo:
        item, depth = todo.pop()
        if depth > _MAX_DEPTH:
            raise ValueError(f"{name}: nested deeper than {_MAX_DEPTH} objects and lists: make it flatter")
        inner = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        todo += [(part, depth + 1) for part in inner]


def _calls_only(prompt: _chat.ChatPrompt, tools: Sequence[Mapping[str, Any]], parallel: bool) -> Constraint:
    """A call is forced at once: where a template has begun a thought, that is ended."""
    functions = [tool["function"] for tool in tools]
    schemas = {each["name"]: each.get("parameters") or _NO_ARGUMENTS for each in functions}
    ends = prompt.thinking_ends
    began = prompt.opening.rfind(prompt.thinking_start) if prompt.thinking_start else -1
    thinks = bool(ends) and began > max(prompt.opening.rfind(end) for end in ends)
    first = ends[0] if thinks else ""
    try:
        lark = tool_grammar(
            prompt.grammar, prompt.parser, schemas, space=SPACE, first=first, parallel=parallel
        )
    except ValueError as error:
        raise ValueError(f"tools: {error}") from None
    return Constraint("calls", lark, "tools", tuple(prompt.preserved))


def _short(error: Exception) -> str:
    """The last line of llama.cpp's errors says what is wrong; those before quote the template."""
    lines = [line for line in str(error).splitlines() if line.strip("- ")]
    return (lines[-1] if lines else "it fails")[:300]
