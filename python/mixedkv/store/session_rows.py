"""The tables of sessions in the index of a store: which entries belong to which, and which were removed."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable

SESSION_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    session BLOB NOT NULL,
    entry TEXT NOT NULL REFERENCES entries (id) ON DELETE CASCADE,
    PRIMARY KEY (session, entry)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS sessions_entry ON sessions (entry);
CREATE TABLE IF NOT EXISTS removed_sessions (
    session BLOB PRIMARY KEY,
    removed REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS session_owners (
    session BLOB PRIMARY KEY,
    owner BLOB NOT NULL,
    noted REAL NOT NULL
) WITHOUT ROWID;
"""
_REMOVED_SECONDS = 30 * 86400.0  # longer than the work that may be under way when a session is removed


class SessionRemovedError(ValueError):
    """A session that was removed gets no new entries."""


class SessionRows:
    """The sessions of an index, by the hashes of their names. The index commits what is written here."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def of_owner(self, owner: bytes, before: float) -> list[bytes]:
        """Return the sessions of an owner that have had entries since before a time."""
        query = "SELECT session FROM session_owners WHERE owner = ? AND noted < ?"
        return [session for (session,) in self._db.execute(query, (owner, before))]

    def last_entry(self, identity: bytes, session: bytes, n: int) -> str | None:
        """Return the id of the entry of a session that begins before position n and reaches the furthest."""
        query = (
            "SELECT id FROM entries JOIN sessions ON sessions.entry = entries.id "
            "WHERE session = ? AND identity = ? AND p0 < ? ORDER BY p1 DESC LIMIT 1"
        )
        row = self._db.execute(query, (session, identity, n)).fetchone()
        return None if row is None else str(row[0])

    def counts(self) -> dict[str, int]:
        """Return the number of sessions each entry belongs to, without those that belong to none."""
        return dict(self._db.execute("SELECT entry, COUNT(*) FROM sessions GROUP BY entry"))

    def of_entry(self, entry: str) -> set[bytes]:
        """Return the sessions that an entry belongs to."""
        members = self._db.execute("SELECT session FROM sessions WHERE entry = ?", (entry,))
        return {member for (member,) in members}

    def join(self, session: bytes, entries: Iterable[str], owner: bytes) -> None:
        """Add entries to a session; those that are not there any more are passed over.

        Raises:
            SessionRemovedError: the session has been removed.
        """
        query = "SELECT 1 FROM removed_sessions WHERE session = ?"
        if self._db.execute(query, (session,)).fetchone() is not None:
            raise SessionRemovedError("session: it has been removed; use another id")
        self._db.executemany(
            "INSERT OR IGNORE INTO sessions SELECT ?, id FROM entries WHERE id = ?",
            [(session, entry) for entry in entries],
        )
        if owner:
            query = "INSERT OR IGNORE INTO session_owners VALUES (?, ?, ?)"
            self._db.execute(query, (session, owner, time.time()))

    def remove(self, session: bytes) -> list[str]:
        """Remove a session for good; return the entries that belonged to no other one."""
        query = (
            "SELECT entry FROM sessions WHERE session = ? AND NOT EXISTS "
            "(SELECT 1 FROM sessions AS other WHERE other.entry = sessions.entry AND other.session != ?)"
        )
        own = [entry for (entry,) in self._db.execute(query, (session, session))]
        now = time.time()
        self._db.execute("DELETE FROM sessions WHERE session = ?", (session,))
        self._db.execute("DELETE FROM session_owners WHERE session = ?", (session,))
        self._db.execute("DELETE FROM removed_sessions WHERE removed < ?", (now - _REMOVED_SECONDS,))
        self._db.execute("INSERT OR REPLACE INTO removed_sessions VALUES (?, ?)", (session, now))
        return own
