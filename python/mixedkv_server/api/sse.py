"""Answers the endpoints that generate: whole, or streamed as events or lines of JSON, with one write for all
waiting events and no task, timer or parser per token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mixedkv.engine import Delta, Done, Job
from mixedkv_server.api.request_limits import answer_bytes
from mixedkv_server.api_error import ApiError
from mixedkv_server.http.middleware import HOLD_ANSWER
from mixedkv_server.http.revoked import ENDING
from mixedkv_server.packing import encode_text, json_chunks
from mixedkv_server.pending import OnEvent, PendingRequest, disconnected, or_disconnect
from mixedkv_server.state import ServerState, packed_answer, tenant, time_left

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_UNBUFFERED = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
Aside: TypeAlias = Callable[..., Awaitable[bytes]]
Headers: TypeAlias = list[tuple[bytes, bytes]]
EVENTS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), *_UNBUFFERED]
NDJSON: Headers = [(b"content-type", b"application/x-ndjson"), *_UNBUFFERED]


def sse(chunk: dict[str, Any]) -> bytes:
    """Return an event."""
    return f"data: {encode_text(chunk)}\n\n".encode()


def long_sse(chunk: dict[str, Any]) -> bytes:
    """Return an event that is large: made in chunks, between which other threads run."""
    return f"data: {''.join(json_chunks(chunk))}\n\n".encode()


def named_sse(chunk: dict[str, Any]) -> bytes:
    """Return an event that is named by its type."""
    return f"event: {chunk['type']}\ndata: {encode_text(chunk)}\n\n".encode()


def json_line(chunk: dict[str, Any]) -> bytes:
    """Return a line of NDJSON."""
    return f"{encode_text(chunk)}\n".encode()


class Template:
    """Encodes events that differ in one text only: the rest is encoded once.

    Args:
        chunk: the event's object, with the string `MARK` in the place of the text.
    """

    MARK = "\x00text\x00"

    def __init__(self, chunk: dict[str, Any]) -> None:
        self._before, self._after = f"data: {encode_text(chunk)}\n\n".split(encode_text(self.MARK))

    def __call__(self, text: str) -> bytes:
        return f"{self._before}{encode_text(text)}{self._after}".encode()


class SentAnswer:
    """An API's objects for one request: the parts of a stream, requested when there is an event or the stream
    has to begin, or one object at the end.

    Args:
        jobs: one for each answer.
        streams: the answers are sent while they are generated.
        progress: the stream tells how far the prompt is, so it begins at once.
        large: the object at the end may take more than a millisecond or two to make and to encode.
    """

    headers: ClassVar[Headers] = EVENTS  # of a stream

    def __init__(
        self,
        server: ServerState,
        jobs: Sequence[Job],
        *,
        streams: bool,
        progress: bool = False,
        large: bool = False,
    ) -> None:
        self.server, self.jobs = server, list(jobs)
        self.streams, self.progress, self.large = streams, progress, large

    def whole(self, ends: list[Done]) -> dict[str, Any] | list[dict[str, Any]]:
        raise NotImplementedError

    def first(self) -> bytes:
        return b""

    def event(self, i: int, event: Delta | Done) -> bytes:
        raise NotImplementedError

    def takes_long(self, i: int) -> bool:
        """Return whether making the next event of an answer may take more than a millisecond or two."""
        return False

    def idle(self) -> bytes:
        """Return bytes to send while there are no events."""
        return PING

    def failed(self, error: ApiError) -> bytes:
        return sse(error.body())

    def last(self) -> bytes:
        return b""


class EventStream(Response):
    """Answers with the events of a pending request. An error before the first event gets an HTTP status, see
    `begin`.

    Args:
        aside: runs a function off the event loop, in turns of tenants.
        interval: seconds without an event after which `idle` is sent.
    """

    def __init__(
        self,
        pending: PendingRequest,
        answer: SentAnswer,
        *,
        aside: Aside,
        interval: float,
    ) -> None:
        self.status_code, self.background = 200, None
        self._pending, self._answer, self._aside = pending, answer, aside
        self._interval, self.raw_headers = interval, list(answer.headers)
        self._begin: tuple[int, Delta | Done] | None = None

    async def begin(self, request: Any) -> EventStream:
        """Wait for the first event, but not for long: the stream then begins without one.

        Raises:
            ApiError: the request fails before its first event.
        """
        self._pending.__enter__()
        try:
            self._pending.tick_every(self._interval)
            if not self._answer.progress:
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
            self._pending.__exit__()  # cancel first, since the engine need not wait for the rest
            for task in (writing, gone):
                task.cancel()
            await asyncio.gather(writing, gone, return_exceptions=True)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pending, answer = self._pending, self._answer
        out = [await self._aside(answer.first) if answer.takes_long(0) else answer.first()]
        if self._begin is not None:
            out.append(await self._make(self._begin))
        try:
            while not pending.over:
                if pending.waiting():
                    await send({"type": "http.response.body", "body": b"".join(out), "more_body": True})
                    out = []
                out.append(await self._make(await pending.next()))
            out.append(answer.last())
        except ApiError as error:  # the status has been sent already
            out.append(answer.failed(error))
        await send({"type": "http.response.body", "body": b"".join(out), "more_body": False})

    async def _make(self, event: tuple[int, Delta | Done] | None) -> bytes:
        if event is None:
            return self._answer.idle()
        if self._answer.takes_long(event[0]):
            return await self._aside(self._answer.event, *event)
        return self._answer.event(*event)


_PING = 15.0  # seconds without an event after which a stream sends a sign of life
_PROGRESS = 0.5  # the same if the client asks for the progress of its prompt


_SHORT_TEXT, _MOST_LOGPROBS_AT_ONCE = 4096, 256


def _is_short(jobs: Sequence[Job], ends: Sequence[Done]) -> bool:
    """Return whether an answer is read and encoded in a millisecond or two, whatever it consists of."""
    if any(job.answer.prompt_logprobs is not None for job in jobs):
        return False
    places = zip(jobs, ends, strict=True)
    n_logprobs = sum(len(end.logprobs) * (1 + (job.request.n_logprobs or 0)) for job, end in places)
    return n_logprobs <= _MOST_LOGPROBS_AT_ONCE and sum(len(end.text) for end in ends) <= _SHORT_TEXT


async def respond(request: Request, answer: SentAnswer, on_event: OnEvent | None = None) -> Response:
    """Run the jobs and answer. A large object is built and encoded off the event loop.

    Raises:
        ApiError: as `PendingRequest`, before anything was sent.
    """
    if answer.streams:
        aside = partial(answer.server.pools.answers.run, tenant(request))
        interval = _PROGRESS if answer.progress else _PING
        pending = _pending(request, answer, on_event)
        return await EventStream(pending, answer, aside=aside, interval=interval).begin(request)
    ends = await generated(request, answer, on_event)
    make = partial(answer.whole, ends)
    if answer.large and not _is_short(answer.jobs, ends):
        return await packed_answer(request, answer.server, make)
    return Response(encode_text(make()), media_type="application/json")


async def generated(request: Request, answer: SentAnswer, on_event: OnEvent | None = None) -> list[Done]:
    """Run the jobs of an answer and return how they ended.

    Raises:
        ApiError: as `PendingRequest`.
        Disconnected: the client disconnected.
    """
    with _pending(request, answer, on_event) as pending:
        return await or_disconnect(request, pending.done())


def _pending(request: Request, answer: SentAnswer, on_event: OnEvent | None) -> PendingRequest:
    server = answer.server
    if not answer.streams:  # of a stream nothing is kept
        request.scope[HOLD_ANSWER](answer_bytes((job.request for job in answer.jobs), server.engine.n_ctx))
    seconds = server.settings.request_timeout
    pending = PendingRequest(server.engine, answer.jobs, seconds, time_left(request), on_event)
    request.scope[ENDING].then(pending.end)
    return pending
