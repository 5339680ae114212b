"""Server-sent events: one write for all that has gathered, and no task, timer or parser per token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mixedkv.engine.job import Delta, Done
from mixedkv.server.api_error import ApiError
from mixedkv.server.pending import PendingRequest, disconnected, or_disconnect

_DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def sse(chunk: dict[str, Any]) -> bytes:
    """One event."""
    return f"data: {_encode(chunk)}\n\n".encode()


class Template:
    """Events that differ in one text only: the rest is encoded once.

    Args:
        chunk: has the string `MARK` where the text goes.
    """

    MARK = "\x00text\x00"

    def __init__(self, chunk: dict[str, Any]) -> None:
        self._before, self._after = f"data: {_encode(chunk)}\n\n".split(_encode(self.MARK))

    def __call__(self, text: str) -> bytes:
        return f"{self._before}{_encode(text)}{self._after}".encode()


class EventStream(Response):
    """Answers with the events of a pending. What fails before there is one has an HTTP status: see `begin`.

    Args:
        first: bytes before everything else.
        make: bytes of an event of choice i.
        last: bytes before [DONE].
    """

    def __init__(
        self,
        pending: PendingRequest,
        first: bytes,
        make: Callable[[int, Delta | Done], bytes],
        last: Callable[[], bytes],
    ) -> None:
        self.status_code, self.background = 200, None
        self._pending, self._first, self._make, self._last = pending, first, make, last
        self._begin: tuple[int, Delta | Done] | None = None

    async def begin(self, request: Any) -> EventStream:
        """Wait for the first event.

        Raises:
            ApiError: there is none.
        """
        self._pending.__enter__()
        try:
            self._begin = await or_disconnect(request, self._pending.next())
        except BaseException:
            self._pending.__exit__()
            raise
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({writing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            self._pending.__exit__()  # first of all: the engine need not wait for the rest
            for task in (writing, gone):
                task.cancel()
            await asyncio.gather(writing, gone, return_exceptions=True)

    async def _write(self, send: Send) -> None:
        assert self._begin is not None
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        pending, out = self._pending, [self._first, self._make(*self._begin)]
        try:
            while not pending.over:
                if pending.waiting():
                    await send({"type": "http.response.body", "body": b"".join(out), "more_body": True})
                    out = []
                out.append(self._make(*await pending.next()))
            out += [self._last(), _DONE]
        except ApiError as error:  # the status has been sent
            out.append(sse(error.body()))
        await send({"type": "http.response.body", "body": b"".join(out), "more_body": False})
