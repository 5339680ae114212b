"""Reads a call that a model writes without the tags of its family: Qwen2.5-Coder answers with nothing but
`{"name": ..., "arguments": {...}}`, at times in a block of code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from mixedkv.engine.chat.chat_template import Parser

_STRING = re.compile(r'"((?:[^"\\]|\\.)*)("?)', re.DOTALL)
_FENCES = ("```json", "```")


@dataclass(frozen=True, slots=True)
class BareCalls:
    """Reads answers as `parser` does, and an answer that is one call without tags.

    Attributes:
        names: of the tools that may be called.
    """

    parser: Parser
    names: Collection[str]

    def parse(self, answer: str, partial: bool) -> str:
        """Return the message. Of an answer that goes on, what may become a call is not said yet.

        Raises:
            ValueError, RuntimeError: as `parser`.
        """
        text = self.parser.parse(answer, partial)
        message: dict[str, Any] = json.loads(text)
        said = message["content"].strip()
        if message["tool_calls"] or not said or not self._may_be_call(said):
            return text
        call = None if partial else self._call(said)
        if not partial and call is None:
            return text
        return json.dumps({**message, "content": "", "tool_calls": [call] if call else []})

    def _call(self, said: str) -> dict[str, str] | None:
        for fence in _FENCES:
            if said.startswith(fence) and said.endswith("```"):
                said = said[len(fence) : -3]
        try:
            call = json.loads(said)
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
            return None
        if call["name"] not in self.names or not isinstance(call["arguments"], dict):
            return None
        arguments = json.dumps(call["arguments"], ensure_ascii=False)
        return {"id": "", "name": call["name"], "arguments": arguments}

    def _may_be_call(self, said: str) -> bool:
        """Return whether an answer that begins so may be a call."""
        if any(fence.startswith(said) for fence in _FENCES):
            return True
        rest = said
        for fence in _FENCES:
            rest = rest.removeprefix(fence).lstrip()
        for word in ("{", '"name"', ":", "", ",", '"arguments"', ":", "{"):
            rest = rest.lstrip()
            if not rest:
                return True
            if not word:
                match = _STRING.match(rest)
                if match is None or not any(
                    name == match[1] if match[2] else name.startswith(match[1]) for name in self.names
                ):
                    return False
                rest = rest[match.end() :]
            elif rest.startswith(word):
                rest = rest[len(word) :]
            else:
                return word.startswith(rest)
        return self._ends_with_object(said)

    def _ends_with_object(self, said: str) -> bool:
        """Return whether nothing follows the object, or it is still open."""
        try:
            end = json.JSONDecoder().raw_decode(said, said.index("{"))[1]
        except (ValueError, RecursionError):
            return True
        return said[end:].strip() in ("", "`", "``", "```")
