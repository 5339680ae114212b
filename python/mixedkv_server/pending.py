"""The jobs of one HTTP request, as the event loop sees them, and how the engine's events get there."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

from starlette.requests import Request

from mixedkv.engine import Delta, Done, Engine, Failed, Job, deliver_directly
from mixedkv.errors import ClosedError, ContextLengthError, QueueFullError
from mixedkv_server.api_error import ApiError, from_engine, timed_out

_T = TypeVar("_T")
Event: TypeAlias = Delta | Done | Failed
OnEvent = Callable[[Delta | Done], Awaitable[None]]


class Disconnected(Exception):  # noqa: N818
    """The client has disconnected, so nobody waits for an answer."""


class PendingRequest:
    """Submits jobs and yields their events until all are done. Use it as a context manager: jobs that are not
    done at its end are cancelled.

    Args:
        timeout: time limit of the request in seconds.
        left: remaining seconds, if some have passed already.
        on_event: awaited with each event before it is yielded; an exception from it is raised instead.

    Raises:
        ApiError: 429, 503 or 400 when the jobs are not accepted; 504, 500 while they run.
    """

    def __init__(
        self,
        engine: Engine,
        jobs: Sequence[Job],
        timeout: float,
        left: float | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self._on_event = on_event
        self._engine, self.jobs = engine, list(jobs)
        self._events: deque[tuple[int, Event]] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._left = len(self.jobs)
        self._loop = asyncio.get_running_loop()
        self._seconds = timeout
        self._timer = self._loop.call_later(timeout if left is None else left, self._time_out)
        self._error: ApiError | None = None  # it is ended from outside
        self._tick: asyncio.TimerHandle | None = None
        self._quiet = self._ticked = False
        for i, job in enumerate(self.jobs):
            job.deliver = partial(self._deliver, i)

    def __enter__(self) -> PendingRequest:
        try:
            self._submit()
        except BaseException:
            self._timer.cancel()  # it would keep the jobs in memory until it is due
            for job in self.jobs:
                job.close()
            raise
        return self

    def _submit(self) -> None:
        try:
            self._engine.submit_jobs(self.jobs)
        except (QueueFullError, ClosedError, ContextLengthError) as error:
            raise from_engine(error) from None

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._tick is not None:
            self._tick.cancel()
        if self._left:
            for job in self.jobs:
                self._engine.cancel(job)

    def _deliver(self, index: int, event: Event) -> None:
        self._events.append((index, event))
        self._quiet = False
        self._wake()

    def tick_every(self, seconds: float) -> None:
        """Let `next` return None if there was no event for so many seconds, up to twice as many."""
        if self._quiet and not self._events:
            self._ticked = True
            self._wake()
        self._quiet = True
        self._tick = self._loop.call_later(seconds, self.tick_every, seconds)

    def _time_out(self) -> None:
        self.end(timed_out(self._seconds))

    def end(self, error: ApiError) -> None:
        """Let `next` raise an error, whatever events wait."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def waiting(self) -> bool:
        """Return whether `next` would wait."""
        return not self._events

    @property
    def over(self) -> bool:
        return self._left == 0

    async def next(self) -> tuple[int, Delta | Done] | None:
        """Return the next event of the jobs.

        Raises:
            ApiError: a job has failed, or the time limit was reached.
        """
        while not self._events and self._error is None:
            if self._ticked:
                self._ticked = False
                return None
            self._arrival = self._loop.create_future()
            await self._arrival
        if self._error is not None:
            raise self._error
        index, event = self._events.popleft()
        if isinstance(event, Failed):
            raise from_engine(event.error)
        if isinstance(event, Done):
            self._left -= 1
        if self._on_event is not None:
            await self._on_event(event)
        return index, event

    async def events(self) -> AsyncIterator[tuple[int, Delta | Done]]:
        while self._left:
            if (event := await self.next()) is not None:
                yield event

    async def done(self) -> list[Done]:
        """Wait for all jobs and return how they ended, in their order."""
        ends: dict[int, Done] = {}
        async for index, event in self.events():
            if isinstance(event, Done):
                ends[index] = event
        return [ends[i] for i in range(len(self.jobs))]


_SOON = 0.05  # seconds, for which nobody asks whether the client is still there


async def unless_disconnected(request: Request, work: Awaitable[_T]) -> _T:
    """Await work that often takes no time, unless it does and the client disconnects meanwhile.

    Raises:
        Disconnected: the client disconnected.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=_SOON)
    except BaseException:
        task.cancel()
        raise
    return task.result() if task.done() else await or_disconnect(request, task)


async def or_disconnect(request: Request, work: Awaitable[_T]) -> _T:
    """Await the work, unless the client disconnects first.

    Raises:
        Disconnected: the client disconnected.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        for future in (task, gone):
            if not future.done():
                future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def disconnected(receive: Callable[[], Awaitable[object]]) -> None:
    """Return when the client has disconnected."""
    while True:
        message = await receive()
        if isinstance(message, dict) and message["type"] == "http.disconnect":
            return


class Delivery:
    """An engine's `deliver`, which wakes the running event loop once for all events of a step. Before the
    loop runs, while prompts are warmed, events are delivered directly; after it they are dropped.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over = False

    def __call__(self, events: Sequence[tuple[Job, Event]]) -> None:
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(deliver_directly, events)
        elif not self._over:
            deliver_directly(events)

    def begin(self) -> None:
        """Deliver all events to the running loop from now on."""
        self._loop = asyncio.get_running_loop()

    def end(self) -> None:
        """Drop events from now on."""
        self._over = True
        self._loop = None
