"""Logs a message the first time that it is due."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Hashable


class LogOnce:
    """Logs each message once; again only at DEBUG. Thread-safe.

    Args:
        most: maximum number of different keys, where clients choose them: further ones count as known.
    """

    def __init__(self, log: logging.Logger, most: int = sys.maxsize) -> None:
        self._log, self._most = log, most
        self._known: set[Hashable] = set()
        self._changing = threading.Lock()

    def warning(self, text: str, *args: object, key: Hashable = None) -> None:
        """Log a warning, unless one with the same key was logged; without a key, the same message."""
        is_new = self.is_new((text, *args) if key is None else key)
        self._log.log(logging.WARNING if is_new else logging.DEBUG, text, *args)

    def is_new(self, key: Hashable) -> bool:
        """Return whether this is the first time that a key is met, and remember it."""
        with self._changing:
            if key in self._known or len(self._known) >= self._most:
                return False
            self._known.add(key)
            return True

    def forget(self, key: Hashable) -> None:
        """Log the message of a key once more when it is due again."""
        with self._changing:
            self._known.discard(key)
