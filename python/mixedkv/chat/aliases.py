"""Index of the stored entries that hold an assistant message, by the message's id. An id is an alias: the
tokens in the store decide what an entry holds.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from mixedkv.database import prepare

_VERSION = 1
_MAX_ROWS = 100_000
_BUSY_SECONDS = 10.0

_TABLES = """
CREATE TABLE IF NOT EXISTS messages (
    number     INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant     TEXT NOT NULL,
    message_id TEXT NOT NULL,
    entry      TEXT NOT NULL,
    n_tokens   INTEGER NOT NULL,
    UNIQUE (tenant, message_id) ON CONFLICT REPLACE
);
CREATE TABLE IF NOT EXISTS copies (
    number     INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant     TEXT NOT NULL,
    message_id TEXT NOT NULL,
    entry      TEXT NOT NULL,
    UNIQUE (tenant, message_id, entry) ON CONFLICT IGNORE
);
"""


class MessageAliases:
    """Keeps aliases in an SQLite file, or in memory if `path` is None. Beyond 100,000 it drops the oldest.

    Raises:
        ValueError: the file is something else, or of a newer version.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._db = self._open()
        except sqlite3.OperationalError as error:
            raise OSError(f"the message index {path} cannot be opened: {error}") from error
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{path} is not a message index: {error}") from error

    def set(self, tenant: str, message_id: str, entry: str, n_tokens: int) -> None:
        """Record that the KV up to the end of a message is `n_tokens` long and ends in `entry`."""
        with self._lock, self._db as db:
            row = db.execute(
                "INSERT INTO messages (tenant, message_id, entry, n_tokens) VALUES (?, ?, ?, ?)",
                (tenant, message_id, entry, n_tokens),
            )
            db.execute("DELETE FROM messages WHERE number <= ?", ((row.lastrowid or 0) - _MAX_ROWS,))

    def add_copies(self, tenant: str, copies: Iterable[tuple[str, str]]) -> None:
        """Record further entries that hold a message, as pairs of message id and entry."""
        rows = [(tenant, message_id, entry) for message_id, entry in copies]
        with self._lock, self._db as db:
            db.executemany("INSERT INTO copies (tenant, message_id, entry) VALUES (?, ?, ?)", rows)
            db.execute(
                "DELETE FROM copies WHERE number <= (SELECT max(number) FROM copies) - ?", (_MAX_ROWS,)
            )

    def get(self, tenant: str, message_ids: Sequence[str]) -> dict[str, tuple[str, int]]:
        """Return entry and number of tokens of each message that is known."""
        found = {}
        with self._lock:
            for message_id in message_ids:
                row = self._db.execute(
                    "SELECT entry, n_tokens FROM messages WHERE tenant = ? AND message_id = ?",
                    (tenant, message_id),
                ).fetchone()
                if row:
                    found[message_id] = row
        return found

    def pop(self, tenant: str, message_id: str) -> AbstractSet[str]:
        """Forget a message and return all entries that hold it."""
        found: AbstractSet[str] = frozenset()
        with self._lock, self._db as db:
            for table in ("messages", "copies"):
                where = f"FROM {table} WHERE tenant = ? AND message_id = ?"
                found |= {entry for (entry,) in db.execute(f"SELECT entry {where}", (tenant, message_id))}
                db.execute(f"DELETE {where}", (tenant, message_id))
        return found

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path or ":memory:", timeout=_BUSY_SECONDS, check_same_thread=False)
        try:
            prepare(db, str(self._path), _VERSION, _TABLES)
            db.commit()
        except BaseException:
            db.close()
            raise
        return db
