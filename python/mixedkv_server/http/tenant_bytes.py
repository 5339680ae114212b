"""Shares memory out between tenants: what one holds leaves room for the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

MAX_ANSWER_BYTES = 64_000_000  # of the answer to one request, as it may become
SMALL = 1 << 16  # bytes that are always taken: as many as there are connections are no danger


class TenantBytes:
    """Counts the bytes that each tenant's requests hold.

    Args:
        most: bytes that all may hold together. Beyond, a tenant may hold an equal share of them among the
            tenants that hold more than a little.
        refusal: the error for a tenant that has no room for more.
    """

    def __init__(self, most: int, refusal: Callable[[], Exception]) -> None:
        self._most, self._refusal = most, refusal
        self._held: Counter[str] = Counter()

    def has_room(self, tenant: str, more: int) -> bool:
        """Return whether a tenant may hold this many bytes more."""
        n_others = sum(name != tenant and n > SMALL for name, n in self._held.items())
        left_of_all = self._most - self._held.total()
        left_of_share = self._most // (1 + n_others) - self._held[tenant]
        return more <= max(left_of_all, left_of_share)

    def hold(self, tenant: str, more: int, *, total: int | None = None) -> None:
        """Count more bytes of a request. A small one, of `total` bytes or else of `more`, always fits.

        Raises:
            Exception: the refusal, as the tenant has no room.
        """
        if (more if total is None else total) > SMALL and not self.has_room(tenant, more):
            raise self._refusal()
        self.add(tenant, more)

    def add(self, tenant: str, n: int) -> None:
        """Count bytes of a tenant; a negative number where they are free again."""
        self._held[tenant] += n
        if not self._held[tenant]:
            del self._held[tenant]
