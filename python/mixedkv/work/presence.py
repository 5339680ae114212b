"""Counts the tenants that have requests in this process."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator


class Presence:
    """Counts the requests that each tenant has, on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n: Counter[str] = Counter()

    @contextlib.contextmanager
    def of(self, tenant: str) -> Iterator[None]:
        """Count a request of a tenant within a `with` block."""
        with self._lock:
            self._n[tenant] += 1
        try:
            yield
        finally:
            with self._lock:
                self._n[tenant] -= 1
                if not self._n[tenant]:
                    del self._n[tenant]

    def has_others(self, tenant: str) -> bool:
        """Return whether any other tenant has a request."""
        return len(self._n) > (tenant in self._n)


presence = Presence()
