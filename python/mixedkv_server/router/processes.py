"""Decides which models have a process: the first request starts it, and idle ones are ended.

All decisions are made on the event loop. One process starts at a time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mixedkv.errors import ClosedError, QueueFullError
from mixedkv_server.models import Described
from mixedkv_server.router.model_process import ModelLoadError, ModelProcess

log = logging.getLogger("mixedkv.server")

_SHUTTING_DOWN = "the server is shutting down"


class Counts(Protocol):
    """Protocol of the counters of loads and unloads, for the metrics."""

    def model_loaded(self, name: str, seconds: float) -> None: ...

    def model_unloaded(self, name: str) -> None: ...

    def model_failed(self, name: str) -> None: ...


@dataclass(eq=False)
class ModelPlace:
    """A model's process, and who uses it.

    Attributes:
        users: number of requests under way.
        wishes: seconds that it stays after each tenant's last request, as that request asked.
        expires: when these seconds are over, by the monotonic clock.
        used: when a request last began to use it.
        leaving: it makes room for another model; new requests wait until it is started again.
        idle: set while there are no users.
    """

    process: ModelProcess
    users: int = 0
    wishes: dict[str, float] = field(default_factory=dict)
    expires: dict[str, float] = field(default_factory=dict)
    used: float = 0.0
    leaving: bool = False
    waiters: list[tuple[str, float | None, asyncio.Future[None]]] = field(default_factory=list)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    starting: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def takes_requests(self) -> bool:
        return self.process.ready and not self.leaving

    @property
    def expires_in(self) -> float:
        """Seconds until it ends if no request comes; infinity if it stays."""
        if self.users:
            return max(self.wishes.values(), default=math.inf)
        return max(0.0, max(self.expires.values(), default=math.inf) - time.monotonic())


class Processes:
    """Starts and ends the processes of models.

    Args:
        keep_alive: seconds that one stays after its last request, unless the request says otherwise.
        max_loaded: most that run at a time; 0 for any number. If it is reached, the least recently used idle
            one ends. If all are in use, one of them takes no more requests until it has ended.
        most_waiting: returns how many requests of a tenant may wait for one model.
        counts: counts starts and ends.
    """

    def __init__(
        self,
        processes: Sequence[ModelProcess],
        *,
        keep_alive: float,
        max_loaded: int,
        most_waiting: Callable[[str], int],
        counts: Counts,
    ) -> None:
        self.places = [ModelPlace(process) for process in processes]
        self._keep_alive, self._max_loaded = keep_alive, max_loaded or 2**31
        self._most_waiting, self._counts = most_waiting, counts
        self._turn = asyncio.Lock()  # held while a process starts or ends
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._n_reloads = 0

    async def use(self, place: ModelPlace, tenant: str, keep_alive: float | None = None) -> None:
        """Wait until a model's process takes requests. It stays until `release`.

        Args:
            keep_alive: seconds that it stays for this tenant after that; None for the default.

        Raises:
            ModelLoadError: it cannot be started.
            QueueFullError: too many requests of this tenant wait for it.
            ClosedError: the server is shutting down.
        """
        if self._closing:
            raise ClosedError(_SHUTTING_DOWN)
        if place.takes_requests:
            self._admit(place, tenant, keep_alive)
            return
        most = self._most_waiting(tenant)
        if (n := sum(name == tenant for name, _, _ in place.waiters)) >= most:
            raise QueueFullError(
                f"{n} requests wait already for {place.name!r}, which is being loaded, and the limit is "
                f"parallel + max_queue={most}"
            )
        came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (tenant, keep_alive, came)
        place.waiters.append(waiter)
        if place.starting is None:
            place.starting = self._task(self._start(place))
        try:
            await came
        except asyncio.CancelledError:
            if came.done() and not came.cancelled() and came.exception() is None:
                self.release(place, tenant)  # it was admitted in the same turn of the loop
            raise
        finally:
            if waiter in place.waiters:
                place.waiters.remove(waiter)

    def release(self, place: ModelPlace, tenant: str) -> None:
        """End a `use`. The time that the process stays begins now."""
        place.users -= 1
        place.expires[tenant] = time.monotonic() + place.wishes.get(tenant, self._keep_alive)
        if not place.users:
            self._rest(place)

    def let_go(self, place: ModelPlace, tenant: str) -> None:
        """End a process as soon as no request needs it, unless another tenant wants it to stay."""
        place.wishes[tenant], place.expires[tenant] = 0.0, time.monotonic()
        if not place.users:
            self._rest(place)

    def reload(self) -> None:
        """Let all processes read keys again, also one that is starting and has read them before."""
        self._n_reloads += 1
        for place in self.places:
            if place.process.ready:
                place.process.signal(signal.SIGHUP)

    async def close(self) -> None:
        """End all processes in order, and return when they have ended."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        for place in self.places:
            _cancel_timer(place)
            self._fail(place, ClosedError(_SHUTTING_DOWN))
        await asyncio.gather(*(place.process.stop() for place in self.places))

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _admit(self, place: ModelPlace, tenant: str, keep_alive: float | None) -> None:
        place.wishes[tenant] = self._keep_alive if keep_alive is None else keep_alive
        place.users += 1
        place.used = time.monotonic()
        place.idle.clear()
        _cancel_timer(place)

    def _rest(self, place: ModelPlace) -> None:
        """Start the timer of a process that nobody uses at the moment."""
        place.idle.set()
        _cancel_timer(place)
        if place.process.ready and not self._closing and (seconds := place.expires_in) < math.inf:
            loop = asyncio.get_running_loop()
            place.timer = loop.call_later(seconds, lambda: self._task(self._expire(place)))

    async def _expire(self, place: ModelPlace) -> None:
        async with self._turn:
            if place.process.ready and not place.users and place.expires_in == 0:
                await self._end(place)

    async def _start(self, place: ModelPlace) -> None:
        try:
            async with self._turn:
                await self._make_room(place)
                began, n_reloads = time.monotonic(), self._n_reloads
                await place.process.start()
                if n_reloads != self._n_reloads:
                    place.process.signal(signal.SIGHUP)
                seconds = time.monotonic() - began
                log.info("the model %s was loaded in %.1f s", place.name, seconds)
                self._counts.model_loaded(place.name, seconds)
                self._welcome(place)
        except ModelLoadError as error:
            log.error("%s", error)
            self._counts.model_failed(place.name)
            self._fail(place, error)
        finally:
            place.starting = None

    def _welcome(self, place: ModelPlace) -> None:
        """Let waiting requests go on, in the order in which they came."""
        waiters, place.waiters = place.waiters, []
        for tenant, keep_alive, came in waiters:
            if not came.done():
                self._admit(place, tenant, keep_alive)
                came.set_result(None)
        if not place.users:  # all of them have given up
            place.expires[""] = time.monotonic() + self._keep_alive
            self._rest(place)

    async def _make_room(self, place: ModelPlace) -> None:
        while True:
            here = [each for each in self.places if each is not place and each.process.runs]
            if len(here) < self._max_loaded:
                return
            idle = [each for each in here if not each.users]
            place = min(idle or here, key=lambda each: each.used)
            place.leaving = True
            try:
                if place.users:
                    await place.idle.wait()
                await self._end(place)
            finally:
                place.leaving = False

    async def _end(self, place: ModelPlace) -> None:
        began = time.monotonic()
        await place.process.stop()
        place.wishes.clear()
        place.expires.clear()
        log.info("the model %s was unloaded in %.1f s", place.name, time.monotonic() - began)
        self._counts.model_unloaded(place.name)

    def _fail(self, place: ModelPlace, error: Exception) -> None:
        waiters, place.waiters = place.waiters, []
        for _, _, came in waiters:
            if not came.done():
                came.set_exception(error)


def _cancel_timer(place: ModelPlace) -> None:
    if place.timer is not None:
        place.timer.cancel()
        place.timer = None


@dataclass(kw_only=True)
class RoutedModel(Described):
    """A model or adapter, and the process that serves it.

    Args:
        others: the other models by name; only of the first model.
    """

    processes: Processes
    place: ModelPlace
    others: dict[str, RoutedModel] = field(default_factory=dict)

    @property
    def all(self) -> list[RoutedModel]:
        """All models and adapters of the router."""
        return [self, *self.others.values()]

    @property
    def loaded(self) -> bool:
        return self.place.takes_requests

    @property
    def expires_in(self) -> float:
        return self.place.expires_in


def routed(model: Described) -> RoutedModel:
    """Return a model that was found by name in the state of a router's application."""
    assert isinstance(model, RoutedModel)
    return model
