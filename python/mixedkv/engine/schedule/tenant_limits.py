"""Limits on what a tenant may use of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


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
