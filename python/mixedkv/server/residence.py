"""Decides which models are in memory: the first request for a model loads it, and unused models are unloaded.

A model and its adapters share weights, so they are loaded and unloaded together, as a `ModelGroup`. Decisions
are made on the event loop. One thread loads and unloads, one group after the other.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from mixedkv.errors import ClosedError, QueueFullError

log = logging.getLogger("mixedkv.server")

Check = Callable[[], None]
_SHUTTING_DOWN = "the server is shutting down"


class ModelLoadError(Exception):
    """A model could not be loaded; the message says which, and why."""


class Residency(Enum):
    """States of a group. One that is LEAVING stays in memory until the last request that uses it ends."""

    OUT = auto()
    LOADING = auto()
    IN = auto()
    LEAVING = auto()
    UNLOADING = auto()


class Counts(Protocol):
    """Protocol of the counters of loads and unloads, for the metrics."""

    def model_loaded(self, name: str, seconds: float) -> None: ...

    def model_unloaded(self, name: str) -> None: ...

    def model_failed(self, name: str) -> None: ...


class Loadable(Protocol):
    """Loads a model and its adapters, and unloads them, on any thread."""

    def load(self, check: Check) -> None:
        """Load. An exception from `check` means that loading is not wanted any more."""

    def unload(self) -> None:
        """Store remaining KV and free everything. Can be called again."""

    async def finish(self) -> None:
        """Wait, on the event loop, for work that no request waits for."""

    @property
    def broken(self) -> bool:
        """True if a loaded model takes no more requests."""


@dataclass(eq=False)
class ModelGroup:
    """A model and its adapters.

    Attributes:
        users: number of requests, and of their pieces of work, that need it.
        wishes: seconds that it stays after each tenant's last request, as that request asked.
        expires: when these seconds are over, by the monotonic clock.
        used: when a request last started to use it.
        must_go: it makes room for another group or is broken: new requests wait until it is loaded again.
    """

    name: str
    loader: Loadable
    place: Residency = Residency.OUT
    users: int = 0
    wishes: dict[str, float] = field(default_factory=dict)
    expires: dict[str, float] = field(default_factory=dict)
    used: float = 0.0
    must_go: bool = False
    waiters: list[_Waiter] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None

    @property
    def in_memory(self) -> bool:
        return self.place is not Residency.OUT

    @property
    def expires_in(self) -> float:
        """Seconds until it is unloaded if no request comes; infinity if it stays."""
        if self.users:
            return max(self.wishes.values(), default=math.inf)
        return max(0.0, max(self.expires.values(), default=math.inf) - time.monotonic())


@dataclass(eq=False)
class _Waiter:
    tenant: str
    keep_alive: float | None
    came: asyncio.Future[None]


class Residence:
    """Decides which groups are in memory.

    Args:
        keep_alive: seconds that a group stays after its last request, unless the request says otherwise.
        max_loaded: maximum number of groups in memory; 0 for any number. If it is reached, the least recently
            used idle group is unloaded. If all are in use, one of them takes no more requests until it is
            unloaded.
        on_demand: groups are loaded and unloaded on demand; otherwise all are loaded by `load_now` and stay.
        most_waiting: returns how many requests of a tenant may wait for one group.
        counts: counts loads and unloads.
    """

    def __init__(
        self,
        *,
        keep_alive: float = math.inf,
        max_loaded: int = 0,
        on_demand: bool = False,
        most_waiting: Callable[[str], int] = lambda tenant: 2**31,
        counts: Counts | None = None,
    ) -> None:
        self.keep_alive, self.on_demand = keep_alive, on_demand
        self.groups: list[ModelGroup] = []
        self._max_loaded = max_loaded or 2**31
        self._most_waiting, self._counts = most_waiting, counts
        self._wanted: deque[ModelGroup] = deque()  # groups to load, in the order in which they were requested
        self._thread = ThreadPoolExecutor(1, "mixedkv-load")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._at_work: asyncio.Task[None] | None = None
        self._closing = False

    def add(self, group: ModelGroup) -> None:
        self.groups.append(group)

    @property
    def n_loaded(self) -> int:
        """Number of groups in memory."""
        return sum(group.in_memory for group in self.groups)

    # --- before the event loop runs, and after it ---

    def load_now(self, group: ModelGroup) -> None:
        """Load a group on this thread, and unload others where there is no room.

        Raises:
            Exception: whatever its loader raises.
        """
        if group.in_memory:
            return
        here = [each for each in self.groups if each.in_memory]
        while len(here) >= self._max_loaded:
            first = min(here, key=lambda each: each.used)
            here.remove(first)
            first.loader.unload()
            first.place = Residency.OUT
            self._count("model_unloaded", first)
        began = time.monotonic()
        group.loader.load(self._check)
        group.place, group.used = Residency.IN, time.monotonic()
        self._count("model_loaded", group, group.used - began)

    def close(self) -> None:
        """Unload everything. Nothing may use the groups any more."""
        self._closing = True
        self._thread.shutdown(cancel_futures=True)
        for group in reversed(self.groups):
            group.loader.unload()
            group.place = Residency.OUT

    def __enter__(self) -> Residence:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the event loop ---

    def begin(self) -> None:
        """Start on the running event loop."""
        self._loop = asyncio.get_running_loop()
        for group in self.groups:
            if group.place is Residency.IN:
                self._keep(group, "", self.keep_alive)
                self._rest(group)

    def refuse(self) -> None:
        """Load no more groups, as the server is shutting down."""
        self._closing = True
        for group in self.groups:
            _cancel_timer(group)
            self._fail(group, ClosedError(_SHUTTING_DOWN))

    async def use(self, group: ModelGroup, tenant: str, keep_alive: float | None = None) -> None:
        """Wait until a group is in memory. It stays there until `release`.

        Args:
            keep_alive: seconds that it stays for this tenant after that; None for the default.

        Raises:
            ModelLoadError: the group cannot be loaded.
            QueueFullError: too many requests of this tenant wait for it.
            ClosedError: the server is shutting down.
        """
        if self._closing:
            raise ClosedError(_SHUTTING_DOWN)
        if self.on_demand and group.place is Residency.IN and group.loader.broken:
            group.place, group.must_go = Residency.LEAVING, True
        if group.place is Residency.LEAVING and not group.must_go:
            group.place = Residency.IN
        if group.place is Residency.IN:
            self._take(group, tenant, keep_alive)
            return
        if sum(each.tenant == tenant for each in group.waiters) >= self._most_waiting(tenant):
            raise QueueFullError(f"too many requests wait already for {group.name!r}, which is being loaded")
        waiter = _Waiter(tenant, keep_alive, asyncio.get_running_loop().create_future())
        group.waiters.append(waiter)
        if group.place is not Residency.LOADING and group not in self._wanted:
            self._wanted.append(group)
        self._go_on()
        try:
            await waiter.came
        except asyncio.CancelledError:
            if waiter.came.done() and not waiter.came.cancelled() and waiter.came.exception() is None:
                self.drop(group)  # it was loaded in the same turn of the loop
            raise
        finally:
            if waiter in group.waiters:
                group.waiters.remove(waiter)
                if not group.waiters and group in self._wanted:
                    self._wanted.remove(group)
                    self._go_on()

    def release(self, group: ModelGroup, tenant: str) -> None:
        """End a `use`. The time that the group stays begins now."""
        if self.on_demand:
            group.expires[tenant] = time.monotonic() + group.wishes.get(tenant, self.keep_alive)
        self.drop(group)

    def hold(self, group: ModelGroup) -> None:
        """Keep a used group in memory until `drop`, for work that may outlive its request."""
        group.users += 1

    def drop(self, group: ModelGroup) -> None:
        """End a `hold`."""
        group.users -= 1
        if not group.users:
            self._rest(group)

    def hold_during(self, group: ModelGroup, work: Future[Any]) -> None:
        """Keep a used group in memory until work on another thread is over."""
        loop = asyncio.get_running_loop()
        self.hold(group)

        def over(_: Future[Any]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self.drop, group)

        work.add_done_callback(over)

    def let_go(self, group: ModelGroup, tenant: str) -> None:
        """Unload a group as soon as no request needs it, unless another tenant wants it to stay."""
        self._keep(group, tenant, 0.0)
        if not group.users:
            self._rest(group)

    def unload_broken(self, group: ModelGroup) -> None:
        """Unload a group that takes no more requests, when its running requests have ended, if it can be
        loaded again. Can be called on any thread.
        """

        def unload() -> None:
            if group.place in (Residency.IN, Residency.LEAVING):
                group.place, group.must_go = Residency.LEAVING, True
                self._go_on()

        if self.on_demand and self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(unload)

    def _keep(self, group: ModelGroup, tenant: str, seconds: float) -> None:
        if self.on_demand:
            group.wishes[tenant] = seconds
            group.expires[tenant] = time.monotonic() + seconds

    def _take(self, group: ModelGroup, tenant: str, keep_alive: float | None) -> None:
        self._keep(group, tenant, self.keep_alive if keep_alive is None else keep_alive)
        group.users += 1
        group.used = time.monotonic()
        _cancel_timer(group)

    def _rest(self, group: ModelGroup) -> None:
        """Start the timer of a model that nobody uses at the moment."""
        _cancel_timer(group)
        if not self.on_demand or self._closing:
            return
        self._go_on()
        seconds = group.expires_in
        if group.place is Residency.IN and seconds < math.inf:
            loop = asyncio.get_running_loop()
            group.timer = loop.call_later(seconds, self._expire, group)

    def _expire(self, group: ModelGroup) -> None:
        group.timer = None
        if group.place is Residency.IN and not group.users:
            group.place = Residency.LEAVING
            self._go_on()

    def _go_on(self) -> None:
        """Start the next load or unload, if one is due."""
        if self._at_work is not None or self._closing:
            return
        gone = [group for group in self.groups if group.place is Residency.LEAVING and not group.users]
        if gone:
            self._begin_unloading(gone[0])
        elif self._wanted and self._wanted[0].place is Residency.OUT:
            if self.n_loaded < self._max_loaded:
                group = self._wanted.popleft()
                group.place = Residency.LOADING
                self._at_work = asyncio.get_running_loop().create_task(self._load(group))
            else:
                self._make_room()

    def _make_room(self) -> None:
        here = [group for group in self.groups if group.place is Residency.IN]
        idle = [group for group in here if not group.users]
        if idle:
            self._begin_unloading(_longest_unused(idle))
        elif here and not any(group.must_go for group in self.groups if group.place is Residency.LEAVING):
            chosen = _longest_unused(here)
            chosen.place, chosen.must_go = Residency.LEAVING, True

    def _begin_unloading(self, group: ModelGroup) -> None:
        group.place = Residency.UNLOADING
        _cancel_timer(group)
        self._at_work = asyncio.get_running_loop().create_task(self._unload(group))

    async def _load(self, group: ModelGroup) -> None:
        began = time.monotonic()
        try:
            await self._in_thread(group.loader.load, self._check)
        except Exception as error:
            group.place = Residency.OUT
            if not self._closing:
                log.error("the model %s could not be loaded: %s", group.name, error)
                self._count("model_failed", group)
            self._fail(group, ModelLoadError(f"the model {group.name!r} could not be loaded: {error}"))
        else:
            group.place = Residency.IN
            seconds = time.monotonic() - began
            log.info("the model %s was loaded in %.1f s", group.name, seconds)
            self._count("model_loaded", group, seconds)
            self._admit(group)
        finally:
            self._at_work = None
        self._go_on()

    async def _unload(self, group: ModelGroup) -> None:
        began = time.monotonic()
        try:
            await group.loader.finish()
            await self._in_thread(group.loader.unload)
        except Exception:
            log.exception("the model %s was not unloaded in order", group.name)
        finally:
            self._at_work = None
        group.place, group.must_go = Residency.OUT, False
        group.wishes.clear()
        group.expires.clear()
        log.info("the model %s was unloaded in %.1f s", group.name, time.monotonic() - began)
        self._count("model_unloaded", group)
        self._go_on()

    def _in_thread(self, function: Callable[..., None], *args: Any) -> Awaitable[None]:
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _admit(self, group: ModelGroup) -> None:
        """Let waiting requests continue, in the order in which they came."""
        waiters, group.waiters = group.waiters, []
        for waiter in waiters:
            if not waiter.came.done():
                self._take(group, waiter.tenant, waiter.keep_alive)
                waiter.came.set_result(None)
        if not group.users:  # all of them have given up
            self._keep(group, "", self.keep_alive)
            self._rest(group)

    def _fail(self, group: ModelGroup, error: Exception) -> None:
        waiters, group.waiters = group.waiters, []
        for waiter in waiters:
            if not waiter.came.done():
                waiter.came.set_exception(error)

    def _check(self) -> None:
        if self._closing:
            raise ClosedError(_SHUTTING_DOWN)

    def _count(self, what: str, group: ModelGroup, *more: float) -> None:
        if self._counts is not None:
            getattr(self._counts, what)(group.name, *more)


def _longest_unused(groups: Sequence[ModelGroup]) -> ModelGroup:
    return min(groups, key=lambda group: group.used)


def _cancel_timer(group: ModelGroup) -> None:
    if group.timer is not None:
        group.timer.cancel()
        group.timer = None
