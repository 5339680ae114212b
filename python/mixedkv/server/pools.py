"""Thread pools for slow work, one for each kind, so that much work of one kind does not delay the others."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from mixedkv.engine.schedule.fair_queue import Limits, Service, unlimited

_T = TypeVar("_T")


class FairPool:
    """Runs functions on a few threads: next one of the tenant that got the least time for its weight. With
    several threads a tenant never has all of them, so that others wait for a part of its work only.

    Args:
        limits: returns the limits of a tenant, of which the weight counts.
    """

    def __init__(self, n_threads: int, name: str, limits: Limits) -> None:
        self._most = max(1, n_threads - 1)  # of one tenant
        self._service = Service(limits)  # seconds
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}  # none of them empty
        self._running: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}_{i}", daemon=True) for i in range(n_threads)
        ]

    def submit(self, tenant: str, function: Callable[..., _T], *args: Any) -> Future[_T]:
        """Run a function on one of the threads.

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
            self._waiting.setdefault(tenant, deque()).append((future, partial(function, *args)))
            self._changed.notify()
        return future

    def close(self) -> None:
        """Cancel what waits, and return when what runs has ended."""
        with self._changed:
            self._closed = True
            for queue in self._waiting.values():
                for future, _ in queue:
                    future.cancel()
            self._waiting.clear()
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _run(self) -> None:
        while (found := self._take()) is not None:
            tenant, future, function = found
            began = time.perf_counter()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            del found, future, function  # nothing of a request is kept
            self._done(tenant, time.perf_counter() - began)

    def _take(self) -> tuple[str, Future[Any], Callable[[], Any]] | None:
        """Wait for work and return it with its tenant; None when the pool is closed."""
        with self._changed:
            while (tenant := self._next()) is None:
                if self._closed:
                    return None
                self._changed.wait()
            queue = self._waiting[tenant]
            future, function = queue.popleft()
            if not queue:
                del self._waiting[tenant]
            self._running[tenant] += 1
            return tenant, future, function

    def _next(self) -> str | None:
        ready = [tenant for tenant in self._waiting if self._running[tenant] < self._most]
        return min(ready, key=self._service.of, default=None)

    def _done(self, tenant: str, seconds: float) -> None:
        with self._changed:
            self._service.add(tenant, seconds)
            self._running[tenant] -= 1
            self._running += Counter()  # keeps those above 0
            if not (self._waiting or self._running):
                self._service.clear()
            self._changed.notify_all()


LARGE = 1 << 16  # bytes of a large body; a smaller one takes a millisecond


class Pools:
    """Thread pools for work off the event loop. Sessions use the loop's own threads, so that a database that
    does not answer delays no other work.

    Args:
        limits: returns the limits of a tenant, of which the weight counts where prompts are prepared.
    """

    def __init__(self, limits: Limits = unlimited) -> None:
        self.prompts = FairPool(3, "mixedkv-prompt", limits)  # templates, tokens, schemas
        self.large_prompts = FairPool(1, "mixedkv-large-prompt", limits)
        self.answers = ThreadPoolExecutor(1, "mixedkv-answer")  # large ones to encode

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *_: object) -> None:
        """Drop waiting work, and wait for running work, which uses the model that is freed next."""
        self.answers.shutdown(cancel_futures=True)
        for pool in (self.prompts, self.large_prompts):
            pool.close()
