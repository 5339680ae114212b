"""Reads a model's text as text, thoughts and calls: at once, or piece by piece while it comes."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# Letters and digits, nine of them: Mistral's templates take no others.
_LETTERS, _ID_LENGTH = string.ascii_letters + string.digits, 9
# An answer is read from its start each time, which takes 0.1 to 1 ms for so many characters. A longer one is
# read again when it has grown by a part: all readings together then take a constant times the last one.
_SHORT, _GROWTH = 4096, 1 / 32


@dataclass(frozen=True, slots=True)
class Part:
    """The next piece of an answer: text, of a thought or not, or a piece of call number `index`.

    A call's first piece has its `id` and its `name`.
    """

    content: str = ""
    reasoning: str = ""
    index: int = -1
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ReadAnswer:
    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def finish_reason(self, reason: str) -> str:
        """Return OpenAI's finish_reason of an answer that ended for this reason."""
        return "tool_calls" if self.calls and reason == "stop" else reason


class AnswerReader:
    """One answer, so far in `answer`. What it has given out stays.

    Args:
        parse: llama.cpp's parser of this family: text and whether it goes on, to a message as JSON. None for
            an answer that is text only.
        parallel: more than one call; else those after the first are left out.
        before: the answer's beginning, which its prompt has: no part of what is given out.
    """

    def __init__(
        self,
        parse: Callable[[str, bool], str] | None,
        *,
        parallel: bool = True,
        before: ReadAnswer | None = None,
    ) -> None:
        self._parse, self._parallel = parse, parallel
        self._before = before or ReadAnswer()
        self._text, self._due = "", 0
        self.answer = ReadAnswer()

    def feed(self, text: str, *, last: bool = False) -> list[Part]:
        """Take the next text and return what is certain now; after the `last` all of it."""
        if self._parse is None:
            self.answer.content += text
            return [Part(content=text)] if text else []
        self._text += text
        if not last and len(self._text) < self._due:
            return []
        self._due = len(self._text) + int(max(0, len(self._text) - _SHORT) * _GROWTH)
        try:
            message = json.loads(self._parse(self._text, not last))
        except (RuntimeError, ValueError):
            if not last or self.answer.calls:
                return []
            message = {  # not as its family does
                "content": self._before.content + self._text,
                "reasoning_content": "",
                "tool_calls": [],
            }
        return [*self._texts(message), *self._calls(message["tool_calls"], last)]

    def _texts(self, message: dict[str, Any]) -> list[Part]:
        answer, before, parts = self.answer, self._before, []
        if reasoning := _rest(message["reasoning_content"], before.reasoning + answer.reasoning):
            answer.reasoning += reasoning
            parts.append(Part(reasoning=reasoning))
        if content := _rest(message["content"], before.content + answer.content):
            answer.content += content
            parts.append(Part(content=content))
        return parts

    def _calls(self, calls: list[dict[str, str]], last: bool) -> list[Part]:
        """Return what is new of the calls. A name is certain once arguments, a call or the end follow."""
        parts = []
        for i, call in enumerate(calls if self._parallel else calls[:1]):
            id_ = name = ""
            if i == len(self.answer.calls):
                if not (last or call["arguments"] or i + 1 < len(calls)):
                    break
                id_, name = call["id"] or new_call_id(), call["name"]
                self.answer.calls.append(Call(id_, name))
            known = self.answer.calls[i]
            arguments = _rest(call["arguments"], known.arguments)
            known.arguments += arguments
            if name or arguments:
                parts.append(Part(index=i, id=id_, name=name, arguments=arguments))
        return parts


def new_call_id() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(_ID_LENGTH))


def _rest(now: str, before: str) -> str:
    """Return the text that has come; nothing where a text has changed that was given out."""
    return now[len(before) :] if now.startswith(before) else ""
