"""Waits between attempts, which grow as they fail."""

from __future__ import annotations

import time
from collections.abc import Callable


class Backoff:
    """Waits `first` seconds after a failure and twice as long after each further one, up to `longest`.

    Attributes:
        seconds: the wait after the latest failure; 0.0 after a success.
    """

    def __init__(self, first: float, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._first, self._longest, self._clock = first, longest, clock
        self.seconds = self._until = 0.0

    @property
    def left(self) -> float:
        """Seconds until the next attempt is due; 0.0 where it is."""
        return max(0.0, self._until - self._clock())

    def failed(self) -> float:
        """Note a failure, and return how long to wait."""
        self.seconds = min(2 * self.seconds, self._longest) or self._first
        self.wait()
        return self.seconds

    def wait(self) -> None:
        """Begin the wait again."""
        self._until = self._clock() + self.seconds

    def succeeded(self) -> None:
        self.seconds = self._until = 0.0
