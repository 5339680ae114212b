"""Keeps waiting jobs by tenant and decides whose turn it is.

Places are given by weighted turns: the steps of each tenant's jobs are counted, and a place goes to the
tenant with the fewest steps for its weight. docs/decisions/013-fair-shares.md has the reasons.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic

from mixedkv.engine.schedule.contract import P
from mixedkv.work.turns import Limits, Service

_TURN = 16  # steps before a place may change hands; fewer mean more pauses


class FairQueue(Generic[P]):
    """The waiting jobs of each tenant in order of arrival. `len` and `n_of` can be called on any thread."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._queues: dict[str, deque[P]] = {}  # none of them empty
        self._service = Service(limits)  # places for a step each, counted while anybody waits

    def __len__(self) -> int:
        return sum(map(len, list(self._queues.values())))

    def __iter__(self) -> Iterator[P]:
        for queue in self._queues.values():
            yield from queue

    def n_of(self, tenant: str) -> int:
        return len(self._queues.get(tenant, ()))

    def of(self, tenant: str) -> list[P]:
        return list(self._queues.get(tenant, ()))

    def append(self, job: P) -> None:
        self._queue(job.tenant).append(job)

    def appendleft(self, job: P) -> None:
        """Put a job before all others of its tenant."""
        self._queue(job.tenant).appendleft(job)

    def remove(self, job: P) -> None:
        queue = self._queues[job.tenant]
        queue.remove(job)
        if not queue:
            del self._queues[job.tenant]
            if not self._queues:  # nobody waits any more
                self._service.clear()

    def clear(self) -> None:
        self._queues.clear()
        self._service.clear()

    def count_step(self, running: Iterable[tuple[P, float]]) -> None:
        """Charge the tenants of these jobs for a step, each for as many places as are given."""
        if self._queues:
            for job, n_places in running:
                self._service.add(job.tenant, n_places)

    def by_turn(self, places: Mapping[str, int]) -> list[str]:
        """Return the waiting tenants that may have one more place, in the order of their turns."""
        turns = [
            (self._level(tenant, places.get(tenant, 0) + 1), queue[0].work.t_submit, tenant)
            for tenant, queue in self._queues.items()
            if self._may_have_more(tenant, places.get(tenant, 0))
        ]
        return [tenant for _, _, tenant in sorted(turns)]

    def who_gives_way(self, tenant: str, places: Mapping[str, int]) -> str | None:
        """Return the tenant that has to give this one a place: a tenant that, with one place less, is still
        served at least as much as this one with the place.
        """
        others = [(self._level(other, n - 1), other) for other, n in places.items() if other != tenant]
        level, other = max(others, default=(float("-inf"), ""))
        return other if self._level(tenant, places.get(tenant, 0) + 1) <= level else None

    def _level(self, tenant: str, n_places: int) -> float:
        """Return the service that a tenant will have had after a turn with so many places."""
        return self._service.of(tenant) + n_places * _TURN / self._limits(tenant).weight

    def _may_have_more(self, tenant: str, n_places: int) -> bool:
        most = self._limits(tenant).running
        return most is None or n_places < most

    def _queue(self, tenant: str) -> deque[P]:
        if tenant not in self._queues:
            self._service.join(tenant, self._queues)
            self._queues[tenant] = deque()
        return self._queues[tenant]
