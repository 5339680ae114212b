"""How both completion endpoints answer: as an event stream, or whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from mixedkv.engine.job import Delta, Done, Job
from mixedkv.server.api.sse import EventStream
from mixedkv.server.pending import PendingRequest, or_disconnect
from mixedkv.server.state import ServerState, json_answer, time_left


class Answer(Protocol):
    """OpenAI's objects of one request: the parts of a stream, or one of all ends."""

    def first(self) -> bytes: ...

    def event(self, i: int, event: Delta | Done) -> bytes: ...

    def last(self) -> bytes: ...

    def whole(self, ends: list[Done]) -> dict[str, Any]: ...


async def respond(
    request: Request, server: ServerState, jobs: Sequence[Job], answer: Answer, *, stream: bool, large: bool
) -> Response:
    """Run the jobs and answer; a `large` object is made and encoded off the event loop.

    Raises:
        ApiError: before anything was sent: see `PendingRequest`.
    """
    pending = PendingRequest(server.engine, jobs, server.settings.request_timeout, time_left(request))
    if stream:
        return await EventStream(pending, answer.first(), answer.event, answer.last).begin(request)
    with pending:
        ends = await or_disconnect(request, pending.done())
    make = partial(answer.whole, ends)
    return await json_answer(server, make if large else make())
