"""When a server that does not answer is asked again."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

FAILURES = 3  # in a row, until nobody asks any more
_FIRST_SECONDS, _LONGEST_SECONDS = 2.0, 60.0


class Breaker:
    """After three failures in a row nobody asks for two seconds. Then one may: if that fails too, nobody for
    twice as long, up to a minute. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, Lock()
        self._failures = 0
        self._seconds = self._until = 0.0

    @property
    def is_open(self) -> bool:
        """Nobody asks, or one does to find out."""
        return self._failures >= FAILURES

    def allows(self) -> bool:
        """Return whether to ask now; a caller that gets True says how it went."""
        with self._lock:
            if not self.is_open:
                return True
            if self._clock() < self._until:
                return False
            self._until = self._clock() + self._seconds  # the others wait for this one
            return True

    def succeeded(self) -> bool:
        """Note a success, and return whether nobody asked before this."""
        with self._lock:
            was_open, self._failures, self._seconds = self.is_open, 0, 0.0
            return was_open

    def failed(self, times: int = 1) -> bool:
        """Note a failure, and return whether nobody asks from now on."""
        with self._lock:
            was_open = self.is_open
            self._failures += times
            if self.is_open:
                self._seconds = min(2 * self._seconds, _LONGEST_SECONDS) or _FIRST_SECONDS
                self._until = self._clock() + self._seconds
            return self.is_open and not was_open
