"""Threads for work off the event loop and the engine's thread, in turns of tenants."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

from mixedkv.work.current import Work, at
from mixedkv.work.presence import presence
from mixedkv.work.turns import Limits, Service

_T = TypeVar("_T")
_LONGEST_REST = 1.0  # seconds: what a tenant asks next does not wait for long


class _Item(NamedTuple):
    future: Future[Any]
    function: Callable[[], Any]
    work: Work


class FairPool:
    """Runs functions on a few threads: next one of the tenant that got the least time for its weight. With
    several threads a tenant never has all of them, so that others wait for a part of its work only.

    Args:
        limits: returns the limits of a tenant, of which the weight counts.
        rest: while other tenants have requests, a tenant's work waits this many times as long as its work
            before took, up to a second. The engine needs the same processors, and its answers would wait.
    """

    def __init__(self, n_threads: int, name: str, limits: Limits, rest: float = 0.0) -> None:
        self._most = max(1, n_threads - 1)  # of one tenant
        self._rest = rest
        self._rests_until: dict[str, float] = {}  # time.monotonic
        self._service = Service(limits)  # seconds
        self._waiting: dict[str, deque[_Item]] = {}  # none of them empty
        self._running: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._closed = False
        self._at_work: set[Work] = set()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}_{i}", daemon=True) for i in range(n_threads)
        ]

    def submit(
        self, tenant: str, function: Callable[..., _T], *args: Any, work: Work | None = None
    ) -> Future[_T]:
        """Run a function on one of the threads.

        Args:
            work: what the function is a part of; None for work of its own.

        Raises:
            RuntimeError: the pool is closed.
        """
        future: Future[_T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the pool is closed")
            for thread in self._threads:
                if thread.ident is None:
                    thread.start()
            busy = {*self._waiting, *self._running}
            if tenant not in busy:
                self._service.join(tenant, busy)
            item = _Item(future, partial(function, *args), work or Work(tenant))
            self._waiting.setdefault(tenant, deque()).append(item)
            self._changed.notify()
        return future

    async def run(self, tenant: str, function: Callable[..., _T], *args: Any) -> _T:
        """Run a function and return what it returns. Where this is cancelled, the function is given up."""
        work = Work(tenant)
        future = self.submit(tenant, function, *args, work=work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            work.give_up()
            self._forget(tenant, future)
            raise

    def close(self) -> None:
        """Cancel what waits, give up what runs, and return when it has ended."""
        with self._changed:
            self._closed = True
            running = list(self._at_work)
            for queue in self._waiting.values():
                for item in queue:
                    item.future.cancel()
            self._waiting.clear()
            self._changed.notify_all()
        for work in running:
            work.give_up()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _forget(self, tenant: str, future: Future[Any]) -> None:
        """Take work that nobody waits for out of its queue, with all that it holds."""
        with self._changed:
            left = [item for item in self._waiting.pop(tenant, ()) if item.future is not future]
            if left:
                self._waiting[tenant] = deque(left)

    def _run(self) -> None:
        while (found := self._take()) is not None:
            tenant, item = found
            began = time.perf_counter()
            if item.future.set_running_or_notify_cancel():
                try:
                    with at(item.work):
                        result = item.function()
                    item.future.set_result(result)
                    del result
                except BaseException as error:
                    item.future.set_exception(error)
            work = item.work
            del found, item  # nothing of a request is kept
            self._done(tenant, work, time.perf_counter() - began)

    def _take(self) -> tuple[str, _Item] | None:
        """Wait for work and return it with its tenant; None when the pool is closed."""
        with self._changed:
            while (tenant := self._next()) is None:
                if self._closed:
                    return None
                self._changed.wait(self._seconds_of_rest())
            queue = self._waiting[tenant]
            item = queue.popleft()
            if not queue:
                del self._waiting[tenant]
            self._running[tenant] += 1
            self._at_work.add(item.work)
            return tenant, item

    def _next(self) -> str | None:
        now = time.monotonic()
        ready = [
            tenant
            for tenant in self._waiting
            if self._running[tenant] < self._most and self._rests_until.get(tenant, 0.0) <= now
        ]
        return min(ready, key=self._service.of, default=None)

    def _seconds_of_rest(self) -> float | None:
        """Return after how many seconds the first waiting tenant has rested; None if none of them rests."""
        now = time.monotonic()
        rests = (self._rests_until.get(tenant, 0.0) - now for tenant in self._waiting)
        return min((seconds for seconds in rests if seconds > 0), default=None)

    def _done(self, tenant: str, work: Work, seconds: float) -> None:
        with self._changed:
            self._at_work.discard(work)
            self._service.add(tenant, seconds)
            self._running[tenant] -= 1
            self._running += Counter()  # keeps those above 0
            now = time.monotonic()
            self._rests_until = {name: end for name, end in self._rests_until.items() if end > now}
            if self._rest and presence.has_others(tenant):
                self._rests_until[tenant] = now + min(self._rest * seconds, _LONGEST_REST)
            if not (self._waiting or self._running):
                self._service.clear()
            self._changed.notify_all()
