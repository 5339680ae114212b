"""Answers the endpoints that generate: as an event stream, or whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from mixedkv.engine.jobs.answer_state import Done
from mixedkv.engine.jobs.job import Job
from mixedkv.server.api.sse import EVENTS, EventStream, Headers, StreamedAnswer
from mixedkv.server.pending import OnEvent, PendingRequest, or_disconnect
from mixedkv.server.state import ServerState, json_answer, time_left

_PING = 15.0  # seconds without an event after which a stream sends a sign of life
_PROGRESS = 0.5  # the same if the client asks for the progress of its prompt


class SentAnswer(StreamedAnswer, Protocol):
    """Protocol of an API's objects for one request: the parts of a stream, or one object at the end."""

    def whole(self, ends: list[Done]) -> dict[str, Any] | list[dict[str, Any]]: ...


async def respond(
    request: Request,
    server: ServerState,
    jobs: Sequence[Job],
    answer: SentAnswer,
    *,
    stream: bool,
    large: bool,
    progress: bool = False,
    on_event: OnEvent | None = None,
    headers: Headers = EVENTS,
) -> Response:
    """Run the jobs and answer. A `large` object is built and encoded off the event loop.

    Args:
        progress: the stream reports the progress of the prompt, so it begins at once.
        headers: headers of a stream.

    Raises:
        ApiError: as `PendingRequest`, before anything was sent.
    """
    pending = PendingRequest(
        server.engine, jobs, server.settings.request_timeout, time_left(request), on_event
    )
    if stream:
        interval = _PROGRESS if progress else _PING
        events = EventStream(pending, answer, interval=interval, at_once=progress, headers=headers)
        return await events.begin(request)
    with pending:
        ends = await or_disconnect(request, pending.done())
    make = partial(answer.whole, ends)
    return await json_answer(server, make if large else make())
