"""Splits a model's output into text, thoughts and calls, at once or chunk by chunk."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# Mistral's templates take ids of nine letters and digits only.
_LETTERS, _ID_LENGTH = string.ascii_letters + string.digits, 9
# An answer is parsed from its start each time, which takes 0.1 to 1 ms for this many characters. A longer
# one is parsed again after growing by a share, so that all passes take a constant times the last one.
_SHORT, _GROWTH = 4096, 1 / 32


@dataclass(frozen=True, slots=True)
class Part:
    """The next chunk of an answer: of its text, of a thought, or of the call number `index`.

    A call's first chunk has its `id` and its `name`.
    """

    content: str = ""
    reasoning: str = ""
    index: int = -1
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Call:
    """A call of a tool.

    Attributes:
        arguments: JSON, or a part of it.
        complete: it ended, so its arguments are all there. Known at the end of the answer.
    """

    id: str
    name: str
    arguments: str = ""
    complete: bool = False

    @property
    def values(self) -> dict[str, Any]:
        """The arguments of a complete call."""
        values: dict[str, Any] = json.loads(self.arguments) if self.arguments.strip() else {}
        return values

    @property
    def message(self) -> dict[str, Any]:
        """The call as an entry of a message's `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class ReadAnswer:
    """An answer as far as it has been read: text, thoughts and calls."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    @property
    def complete_calls(self) -> list[Call]:
        """The calls that ended. One that was cut off, by a limit or a stop string, is nobody's to run."""
        return [call for call in self.calls if call.complete]

    @property
    def message(self) -> dict[str, Any]:
        """The text and the thoughts, without calls, as a message for the history."""
        said: dict[str, Any] = {"role": "assistant", "content": self.content}
        return {**said, "reasoning_content": self.reasoning} if self.reasoning else said

    def finish_reason(self, reason: str) -> str:
        """Return OpenAI's finish_reason of an answer that ended for this reason: "length" if a call in it was
        cut off.
        """
        if len(self.complete_calls) < len(self.calls):
            return "length"
        return "tool_calls" if self.calls and reason == "stop" else reason


class AnswerReader:
    """Reads one answer, which is in `answer` as far as it has come. Text that was returned is never taken
    back.

    Args:
        parse: llama.cpp's parser for this family of models: takes the text and whether more follows, and
            returns a message as JSON. None for answers that are text only.
        parallel: allow more than one call; otherwise those after the first are left out.
        before: the beginning of the answer that is in the prompt, which is not returned.
    """

    def __init__(
        self,
        parse: Callable[[str, bool], str] | None = None,
        *,
        parallel: bool = True,
        before: ReadAnswer | None = None,
    ) -> None:
        self._parse, self._parallel = parse, parallel
        self._before = before or ReadAnswer()
        self._text, self._due = "", 0
        self.answer = ReadAnswer()

    @property
    def is_parsed(self) -> bool:
        """True if the text has to be parsed for thoughts and calls."""
        return self._parse is not None

    @property
    def takes_long(self) -> bool:
        """True if an answer of this length is parsed for more than a millisecond or two."""
        return self._parse is not None and len(self._text) > 2 * _SHORT

    def feed(self, text: str, *, last: bool = False) -> list[Part]:
        """Add text and return the parts that are certain now, or all of them after the `last` text."""
        if self._parse is None:
            self.answer.content += text
            return [Part(content=text)] if text else []
        self._text += text
        if not last and len(self._text) < self._due:
            return []
        self._due = len(self._text) + int(max(0, len(self._text) - _SHORT) * _GROWTH)
        if not last:
            message = self._read(len(self._text))
            return self._parts(message, False) if message is not None else []
        whole = self._read(len(self._text), last=True)
        parts = self._end(self._text) if whole is None else self._parts(whole, True)
        for i, call in enumerate(self.answer.calls):
            ended = whole is not None or i + 1 < len(self.answer.calls)
            call.complete = _is_object(call.arguments) or (ended and not call.arguments.strip())
        return parts

    def _read(self, n: int, last: bool = False) -> dict[str, Any] | None:
        """Return the message in the first `n` characters; None if they are not in the family's format."""
        assert self._parse is not None
        try:
            message: dict[str, Any] = json.loads(self._parse(self._text[:n], not last))
        except (RuntimeError, ValueError):
            return None
        return message

    def _end(self, text: str) -> list[Part]:
        """Return the last parts of a text that ends in the middle of something: what can be read of it if
        there are calls, otherwise the text as it is.
        """
        readable, unreadable = 0, len(text) + 1  # lengths; most often all of it is readable
        message, n = None, len(text)
        while unreadable - readable > 1:
            if (found := self._read(n)) is not None:
                message, readable = found, n
            else:
                unreadable = n
            n = (readable + unreadable) // 2
        if message is not None and (message["tool_calls"] or self.answer.calls):
            return self._parts(message, False)
        if self.answer.calls:
            return []
        said = {"content": self._before.content + text, "reasoning_content": "", "tool_calls": []}
        return self._parts(said, True)

    def _parts(self, message: dict[str, Any], last: bool) -> list[Part]:
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
        """Return new chunks of the calls. A name is certain once arguments, a call or the end follow."""
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


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _rest(now: str, before: str) -> str:
    """Return the new text, or nothing if text that was returned before has changed."""
    return now[len(before) :] if now.startswith(before) else ""
