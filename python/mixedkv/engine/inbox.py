"""Passes jobs and functions to the engine's thread, events back, and the turn from one engine to the next.
Counts who may queue more.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from mixedkv.engine.jobs.job import Event, Job
from mixedkv.engine.schedule.progress import Progress
from mixedkv.engine.schedule.scheduler import Scheduler
from mixedkv.errors import ClosedError, QueueFullError
from mixedkv.limits import check_int
from mixedkv.work.turns import Limits

_T = TypeVar("_T")


class Inbox:
    """Every method but `wait`, `take`, `answer_call` and `fail_calls` is for any thread."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self.closed = False

    def __len__(self) -> int:
        """Return the number of jobs that nobody has taken yet."""
        return len(self._jobs)

    def jobs(self) -> list[Job]:
        """Return the jobs that nobody has taken yet."""
        return list(self._jobs)

    @property
    def has_calls(self) -> bool:
        """True if a function waits to be run."""
        return bool(self._calls)

    def put(self, job: Job) -> None:
        """Hand an item to the engine's thread.

        Raises:
            ClosedError: the engine takes no more items.
        """
        with self._changed:
            if self.closed:
                raise ClosedError("the engine is shutting down")
            self._jobs.append(job)
            self._changed.notify()

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Have a function run between two steps."""
        future: Future[_T] = Future()
        with self._changed:
            if self.closed:
                future.set_exception(ClosedError("the engine has stopped"))
            else:
                self._calls.append((function, future))
                self._changed.notify()
        return future

    def wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify()

    def wait(self, seconds: float | None = None) -> None:
        """Wait at most `seconds` until there is an item."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._jobs or self._calls, seconds)

    def take(self) -> list[Job]:
        jobs = []
        while self._jobs:
            jobs.append(self._jobs.popleft())
        return jobs

    def answer_call(self) -> bool:
        """Run the oldest waiting function; return False if there is none."""
        if not self._calls:
            return False
        function, future = self._calls.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
        return True

    def fail_calls(self, error: Exception) -> None:
        while self._calls:
            future = self._calls.popleft()[1]
            if future.set_running_or_notify_cancel():
                future.set_exception(error)


class Turns:
    """A lock that goes to the engine that has waited the longest, so that two busy engines step alternately,
    each with all threads. If both computed at once, each would wait for the other's threads at every layer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            turn = threading.Event()
            self._waiting.append(turn)
        turn.wait()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._taken = False


log = logging.getLogger("mixedkv.engine")

Deliver = Callable[[Sequence[tuple[Job, Event]]], None]


def deliver_directly(events: Sequence[tuple[Job, Event]]) -> None:
    """Deliver events on this thread. A callback that raises does not affect other jobs."""
    for job, event in events:
        try:
            job.deliver(event)
        except Exception:
            log.exception("an event could not be delivered")


class Outbox:
    """Collects the events of a step and hands them out together after it."""

    def __init__(self, deliver: Deliver) -> None:
        self.deliver = deliver
        self._events: list[tuple[Job, Event]] = []

    def put(self, *events: tuple[Job, Event]) -> None:
        self._events += events

    def flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            try:
                self.deliver([(job, event) for job, event in events if not job.cancelled])
            except Exception:
                log.exception("events could not be delivered")


class QueueRoom:
    """Limits how many jobs of a tenant may wait.

    Args:
        max_queue: maximum number of waiting jobs for tenants without a limit of their own.
        coming: returns the waiting jobs that have not reached the scheduler yet.
    """

    def __init__(
        self,
        scheduler: Scheduler[Any],
        limits: Limits,
        max_queue: int,
        coming: Callable[[], Iterable[Progress]],
    ) -> None:
        self._scheduler, self._limits = scheduler, limits
        self.max_queue = check_int("max_queue", max_queue, 0)
        self._coming = coming
        self._preparing: Counter[str] = Counter()

    def most(self, tenant: str) -> int:
        """Return the maximum number of running plus queued jobs per tenant."""
        parallel = self._scheduler.parallel
        return min(parallel, self._limits(tenant).running or parallel) + self._most_queued(tenant)

    @contextmanager
    def preparing(self, tenant: str) -> Iterator[None]:
        """Count a request that is being prepared as a waiting job. Used by one thread.

        Raises:
            QueueFullError: the tenant has no room for it.
        """
        self.check(tenant, 1)
        self._preparing[tenant] += 1
        try:
            yield
        finally:
            self._preparing[tenant] -= 1
            if not self._preparing[tenant]:
                del self._preparing[tenant]

    def check(self, tenant: str, n: int) -> None:
        """Refuse jobs that a tenant has no room for.

        Raises:
            QueueFullError: n more jobs of this tenant are too many. A tenant without any job may always add
                one.
        """
        scheduler = self._scheduler
        waiting = scheduler.waiting.n_of(tenant) + sum(job.tenant == tenant for job in self._coming())
        waiting += self._preparing[tenant]
        running = sum(job.tenant == tenant for job in list(scheduler.running))
        most = self._limits(tenant).running or scheduler.parallel
        free = max(0, min(scheduler.parallel - len(scheduler.running), most - running))
        if n > max(self._most_queued(tenant) + free - waiting, 0 if waiting or running else 1):
            name = "max_queue" if self._limits(tenant).queued is None else "queued"
            raise QueueFullError(
                f"{waiting} requests wait already, and the limit is {name}={self._most_queued(tenant)}"
            )

    def _most_queued(self, tenant: str) -> int:
        queued = self._limits(tenant).queued
        return self.max_queue if queued is None else queued
