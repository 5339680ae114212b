"""What leaves the store first: the order, and what it is made of."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Literal

Eviction = Literal["lru", "oldest", "gdsf"]

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
# had. The cost is what evaluating the tokens takes: attention to 16k of them is about as much work as the
# weights.
_WORTH = """
INSERT INTO worth SELECT id, :uses, :uses * (p1 - p0) * (1 + (p0 + p1) / 32768.0) / MAX(1, nbytes)
    + COALESCE((SELECT priority FROM aging), 0) FROM entries WHERE id = :entry
ON CONFLICT (entry) DO UPDATE SET uses = uses + excluded.uses, priority =
    COALESCE((SELECT priority FROM aging), 0) + (uses + excluded.uses) *
    (SELECT (p1 - p0) * (1 + (p0 + p1) / 32768.0) / MAX(1, nbytes) FROM entries WHERE id = excluded.entry)
"""
_AGE = """
INSERT INTO aging SELECT 1, priority FROM worth WHERE entry = ?
ON CONFLICT (id) DO UPDATE SET priority = MAX(priority, excluded.priority)
"""


def note_uses(db: sqlite3.Connection, uses: Mapping[str, int]) -> None:
    """Entries were used, each so often."""
    db.executemany(_WORTH, [{"entry": entry, "uses": n} for entry, n in uses.items()])


def note_evicted(db: sqlite3.Connection, entry: str) -> None:
    """An entry leaves for others: what comes now is worth more than it was."""
    db.execute(_AGE, (entry,))
