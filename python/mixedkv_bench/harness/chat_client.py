"""A chat completion over HTTP, streamed, with the time at which each token came out of the socket."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from mixedkv_bench.harness.contexts import CannotRunError
from mixedkv_bench.harness.http_connection import ClientConnection

Message = dict[str, str]


@dataclass
class ChatAnswer:
    """A request's answer: seconds from sending it, and texts, of each piece; usage as the server said."""

    times: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    end: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft(self) -> float:
        return self.times[0]

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def n_tokens(self, n_asked: int) -> int:
        """Return the number of tokens generated. A server that does not tell sends a piece for each but for
        those without text.
        """
        known = self.usage.get("completion_tokens")
        return int(known) if known is not None else n_asked if self.end == "length" else len(self.times)

    @property
    def n_prompt(self) -> int | None:
        return self.usage.get("prompt_tokens")

    @property
    def n_cached(self) -> int | None:
        return self._details.get("cached_tokens")

    @property
    def tier(self) -> str | None:
        """Tier that the cached tokens came from, if the server is ours."""
        return self._details.get("cached_tier")

    @property
    def _details(self) -> dict[str, Any]:
        return self.usage.get("prompt_tokens_details") or {}


@dataclass(frozen=True, slots=True)
class ClientSampling:
    """Greedy, `n_gen` tokens to the last: what would end an answer is ruled out, with any server the same
    way.
    """

    n_gen: int
    banned: tuple[int, ...]

    def body(self, messages: list[Message]) -> dict[str, Any]:
        return {
            "messages": messages,
            "max_tokens": self.n_gen,
            "temperature": 0.0,
            "logit_bias": {str(token): -100.0 for token in self.banned},
            "stream": True,
            "stream_options": {"include_usage": True},
        }


async def ask(connection: ClientConnection, body: dict[str, Any]) -> ChatAnswer:
    """Ask for one answer.

    Raises:
        CannotRunError: the server refused, or gave no text.
    """
    answer = ChatAnswer()
    async for _ in watch(connection, body, answer):
        pass
    if not answer.times:
        raise CannotRunError("the server ended an answer without any text")
    return answer


async def watch(
    connection: ClientConnection, body: dict[str, Any], answer: ChatAnswer
) -> AsyncIterator[float]:
    """Fill `answer` as it comes; yields the clock's time of every piece of text."""
    begin = time.perf_counter()
    connection.send("/v1/chat/completions", body)
    async for line in connection.lines():
        now = time.perf_counter()
        if line.startswith(b"data: {") and _take(_parse(line[6:]), answer, now - begin):
            yield now


def _parse(data: bytes) -> dict[str, Any]:
    try:
        event: dict[str, Any] = json.loads(data)
    except ValueError:
        raise CannotRunError(f"the server sent an event that is not JSON: {data[:80]!r}") from None
    return event


def _take(event: dict[str, Any], answer: ChatAnswer, seconds: float) -> bool:
    """Take an event, and return whether it brought text."""
    if "error" in event:
        raise CannotRunError(f"the server failed: {event['error']}")
    answer.usage = event.get("usage") or answer.usage
    for choice in event.get("choices") or ():
        answer.end = choice.get("finish_reason") or answer.end
        if text := (choice.get("delta") or {}).get("content"):
            answer.times.append(seconds)
            answer.texts.append(text)
            return True
    return False
