"""Decides what leaves the store first: the order, and what it is made of."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Literal, get_args

Eviction = Literal["lru", "oldest", "gdsf"]
EVICTIONS: tuple[Eviction, ...] = get_args(Eviction)

SCHEMA = """
CREATE TABLE IF NOT EXISTS worth (
    entry TEXT PRIMARY KEY REFERENCES entries (id) ON DELETE CASCADE,
    uses INTEGER NOT NULL,
    priority REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS aging (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    priority REAL NOT NULL
);
"""
LEAF = """
SELECT id, CAST(nbytes AS INTEGER), CAST(used AS REAL), COALESCE(tenant, x'') FROM entries AS leaf
LEFT JOIN tenants ON tenants.identity = leaf.identity
WHERE id NOT IN (SELECT value FROM json_each(?))
    AND NOT EXISTS (SELECT 1 FROM entries AS child WHERE child.parent = leaf.id)
"""
HELD = """
SELECT COALESCE(tenant, x''), SUM(CAST(nbytes AS INTEGER)), COALESCE(MAX(CAST(weight AS REAL)), 1.0)
FROM entries LEFT JOIN tenants ON tenants.identity = entries.identity GROUP BY 1
"""
ORDER = {
    "lru": "used, created",
    "oldest": "created",
    "gdsf": "COALESCE((SELECT priority FROM worth WHERE entry = leaf.id), 0), used, created",
}
# GreedyDual-Size-Frequency (Cherkasova, HPL-98-69): uses times cost by size, plus what the last one that left
# had.
_WORTH = """
INSERT INTO worth SELECT id, :uses, :uses * worth_of_use(p0, p1, nbytes)
    + COALESCE((SELECT priority FROM aging), 0) FROM entries WHERE id = :entry
ON CONFLICT (entry) DO UPDATE SET uses = uses + excluded.uses, priority =
    COALESCE((SELECT priority FROM aging), 0) + (uses + excluded.uses) *
    (SELECT worth_of_use(p0, p1, nbytes) FROM entries WHERE id = excluded.entry)
"""
_AGE = """
INSERT INTO aging SELECT 1, priority FROM worth WHERE entry = ?
ON CONFLICT (id) DO UPDATE SET priority = MAX(priority, excluded.priority)
"""


def worth_of_use(p0: int, p1: int, n_bytes: int) -> float:
    """Return the worth of a use: what evaluating tokens [p0, p1) takes, for the bytes of their KV.

    Attention to 16k tokens is about as much work as the weights.
    """
    return (p1 - p0) * (1 + (p0 + p1) / 32768) / max(1, n_bytes)


def prepare(db: sqlite3.Connection) -> None:
    """Teach a connection the functions that the statements here use."""
    db.create_function("worth_of_use", 3, worth_of_use, deterministic=True)


def note_uses(db: sqlite3.Connection, uses: Mapping[str, int]) -> None:
    """Count the uses of entries."""
    db.executemany(_WORTH, [{"entry": entry, "uses": n} for entry, n in uses.items()])


def note_evicted(db: sqlite3.Connection, entry: str) -> None:
    """Note that an entry was evicted; entries that come later are worth more than it was."""
    db.execute(_AGE, (entry,))
