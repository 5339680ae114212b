"""Limits of what a tenant may have of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of a tenant, and its weight beside others.

    Attributes:
        weight: its share beside other tenants that want something.
        running: answers at a time; None for all places there are.
        queued: jobs that may wait; None for the engine's max_queue.
        kept: prefixes that are evicted last because that was asked for; None for an equal share of them.
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
