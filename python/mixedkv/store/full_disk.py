"""Handles a disk that is full before the store is: when to try again, and what to log."""

from __future__ import annotations

import errno
import logging
import sqlite3
import time
from collections.abc import Callable

from mixedkv.store.tiers.disk import is_full

_LOG = logging.getLogger("mixedkv.store")
_FIRST_SECONDS, _LONGEST_SECONDS = 1.0, 300.0


class FullDisk:
    """Waits twice as long after each failure. Logs one line when the disk is full, and one when it has room
    again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told = False
        self._seconds = self._until = 0.0

    def store(self, publish: Callable[[], None], make_room: Callable[[int], bool], size: int) -> None:
        """Publish some bytes. If there is no room, evict as much, then twice and four times as much, then
        wait, so that a disk filled by others does not cost all entries.

        Args:
            make_room: evicts entries; returns False if there are none to evict.

        Raises:
            OSError, sqlite3.OperationalError: it cannot be written.
        """
        self.check()
        for more in (size, 2 * size, 4 * size, 0):
            try:
                publish()
            except (OSError, sqlite3.OperationalError) as error:
                if not is_full(error):
                    raise
                if not (more and make_room(more)):
                    self.failed()
                    raise
            else:
                self.succeeded()
                return

    def check(self) -> None:
        """Refuse to write while the disk is known to be full.

        Raises:
            OSError: ENOSPC, the next try is not due yet.
        """
        left = self._until - self._clock()
        if left > 0:
            raise OSError(errno.ENOSPC, f"the disk is full: nothing is stored for {left:.0f} seconds")

    def tell(self) -> None:
        if not self._told:
            self._told = True
            _LOG.warning("the disk is full before the store is: entries are evicted for new ones")

    def failed(self) -> None:
        """Note that there was no room even after evictions, and wait longer each time."""
        self.tell()
        self._seconds = min(2 * self._seconds, _LONGEST_SECONDS) or _FIRST_SECONDS
        self._until = self._clock() + self._seconds

    def succeeded(self) -> None:
        if self._seconds:
            _LOG.info("the disk has room again: entries are stored")
            self._told = False
        self._seconds = self._until = 0.0
