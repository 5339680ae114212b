"""A SQLite database with a write-ahead log, whose shared memory may be cut short."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

log = logging.getLogger("mixedkv")


class WalConnection(sqlite3.Connection):
    """A connection that survives its `-shm` being cut short, by a backup or a clean-up of the folder.

    Every process that has the database open has this file mapped: what reads behind its end is ended by the
    system (SIGBUS). So its size is looked at before each statement, which takes a microsecond. An empty index
    of the log is made again by SQLite, from the log.
    """

    _shm: str | None = None
    _inode = _size = 0
    _is_stale = False  # cut short within the transaction

    def watch(self, path: str | Path) -> None:
        """Look at the shared memory of a database from here on."""
        self._shm = f"{path}-shm"

    def execute(self, sql: str, values: Any = (), /) -> sqlite3.Cursor:
        self._mend(sql)
        return super().execute(sql, values)

    def executemany(self, sql: str, values: Iterable[Any], /) -> sqlite3.Cursor:
        self._mend(sql)
        return super().executemany(sql, values)

    def _mend(self, sql: str) -> None:
        """Make a file whole again that was cut short, and empty, so that every process makes its index anew.

        Raises:
            sqlite3.OperationalError: a transaction had begun, and has to be rolled back.
        """
        if self._shm is None:
            return
        self._is_stale = self._is_stale and self.in_transaction
        with suppress(OSError):  # there is none yet, or it was removed: then the mapping stays whole
            found = os.stat(self._shm)
            if found.st_ino != self._inode:
                self._inode, self._size = found.st_ino, 0
            if found.st_size < self._size:
                log.warning("%s was cut short by someone else: its index is made again", self._shm)
                # by its path: who closes a file of a database drops the locks that the process has on it
                os.truncate(self._shm, 0)
                os.truncate(self._shm, self._size)
                self._is_stale = self.in_transaction
            self._size = max(self._size, found.st_size)
        if self._is_stale and sql != "ROLLBACK":
            raise sqlite3.OperationalError(f"{self._shm} was cut short: roll this transaction back")
