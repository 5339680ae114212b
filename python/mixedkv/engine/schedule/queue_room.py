"""Limits how many jobs of a tenant may run and wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from mixedkv.engine.schedule.fair_queue import Limits
from mixedkv.engine.schedule.progress import Progress
from mixedkv.engine.schedule.scheduler import Scheduler
from mixedkv.errors import QueueFullError


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
        self._scheduler, self._limits, self.max_queue = scheduler, limits, max_queue
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
            raise QueueFullError(f"{waiting} requests wait already")

    def _most_queued(self, tenant: str) -> int:
        queued = self._limits(tenant).queued
        return self.max_queue if queued is None else queued
