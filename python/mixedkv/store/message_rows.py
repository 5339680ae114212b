"""The table of message ids in the index of a store."""

from __future__ import annotations

import sqlite3
from typing import Any

MESSAGE_SCHEMA = """
CREATE TABLE IF NOT EXISTS messages (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant BLOB NOT NULL,
    message_id TEXT NOT NULL,
    entry TEXT NOT NULL REFERENCES entries (id) ON DELETE CASCADE,
    n_tokens INTEGER NOT NULL,
    noted REAL NOT NULL,
    UNIQUE (tenant, message_id, entry)
);
CREATE INDEX IF NOT EXISTS messages_entry ON messages (entry);
"""
_FIELDS = "tenant, message_id, n_tokens, noted"


def message_rows(db: sqlite3.Connection, entry: str) -> list[Any]:
    """Return the rows of an entry that is about to be replaced."""
    return list(db.execute(f"SELECT {_FIELDS} FROM messages WHERE entry = ?", (entry,)))


def put_message_rows(db: sqlite3.Connection, entry: str, rows: list[Any]) -> None:
    """Add these rows to another entry."""
    db.executemany(
        f"INSERT OR REPLACE INTO messages ({_FIELDS}, entry) VALUES (?, ?, ?, ?, ?)",
        [(*row, entry) for row in rows],
    )
