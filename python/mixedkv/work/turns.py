"""Turns of tenants: what each was given, divided by its weight. The next turn is of who was given least."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


class Service:
    """Counts what each tenant was given, divided by its weight."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._given: dict[str, float] = {}

    def of(self, tenant: str) -> float:
        return self._given.get(tenant, 0.0)

    def add(self, tenant: str, n: float) -> None:
        self._given[tenant] = self.of(tenant) + n / self._limits(tenant).weight

    def join(self, tenant: str, others: Iterable[str]) -> None:
        """Start a new tenant level with the least served of the others, as it is owed nothing for the time
        before.
        """
        self._given[tenant] = max(self.of(tenant), min(map(self.of, others), default=0.0))

    def clear(self) -> None:
        self._given.clear()


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of a tenant, and its weight beside others.

    Attributes:
        weight: its share when other tenants are waiting too.
        running: maximum number of answers at a time; None for no limit.
        queued: maximum number of waiting jobs; None for the engine's max_queue.
        kept: maximum number of kept prefixes, which are evicted last; None for an equal share.
    """

    weight: int = 1
    running: int | None = None
    queued: int | None = None
    kept: int | None = None


Limits = Callable[[str], TenantLimits]
_NONE = TenantLimits()


def unlimited(tenant: str) -> TenantLimits:
    """Return limits under which all tenants are equal."""
    return _NONE
