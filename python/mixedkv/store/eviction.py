"""Decides which entry leaves a store first."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

Eviction = Literal["lru", "oldest", "gdsf"]
EVICTIONS: tuple[Eviction, ...] = get_args(Eviction)

_STALE_SECONDS = 86400.0  # entries that were not used for so long leave before all others
_LEAST_WEIGHT = 1e-6

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
_LEAF = """
SELECT id, CAST(nbytes AS INTEGER), CAST(used AS REAL), COALESCE(tenant, x'') FROM entries AS leaf
LEFT JOIN tenants ON tenants.identity = leaf.identity
WHERE id NOT IN (SELECT value FROM json_each(?))
    AND NOT EXISTS (SELECT 1 FROM entries AS child WHERE child.parent = leaf.id)
"""
_HELD = """
SELECT COALESCE(tenant, x''), SUM(CAST(nbytes AS INTEGER)), COALESCE(MAX(CAST(weight AS REAL)), 1.0)
FROM entries LEFT JOIN tenants ON tenants.identity = entries.identity GROUP BY 1
"""
_ORDER = {
    "lru": "used, created",
    "oldest": "created",
    "gdsf": "COALESCE((SELECT priority FROM worth WHERE entry = leaf.id), 0), used, created",
}
# GreedyDual-Size-Frequency (Cherkasova, HPL-98-69): uses times cost by size, plus what the last one that left
# had.
_ADD_USES = """
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


def next_to_leave(
    db: sqlite3.Connection, eviction: Eviction, keep: Iterable[str], tenant: bytes | None = None
) -> tuple[str, int] | None:
    """Return the id and the bytes of the entry that leaves first, of one tenant if it is given.

    An entry that was not used for a day goes first. Then the tenant that holds the most by its weight gives
    one up, so that nobody takes the place of a tenant that holds less. An entry that others build on stays
    until they are gone: they would be of no use without it.
    """
    kept, order = json.dumps(list(keep)), f"ORDER BY {_ORDER[eviction]} LIMIT 1"

    def first_of(tenant: bytes) -> tuple[str, int] | None:
        query = f"{_LEAF} AND COALESCE(tenant, x'') = ? {order}"
        row = db.execute(query, (kept, tenant)).fetchone()
        return row and (row[0], row[1])

    if tenant is not None:
        return first_of(tenant)
    first = db.execute(f"{_LEAF} {order}", (kept,)).fetchone()
    if first is None or first[2] < time.time() - _STALE_SECONDS:
        return first and (first[0], first[1])
    held = sorted(db.execute(_HELD), key=lambda row: -row[1] / max(row[2], _LEAST_WEIGHT))
    return next(filter(None, (first_of(tenant) for tenant, _, _ in held)), None)


def tenant_bytes(db: sqlite3.Connection, tenant: bytes) -> int:
    """Return the bytes of a tenant's files."""
    return sum(n_bytes for other, n_bytes, _ in db.execute(_HELD) if other == tenant)


def worth_of_use(p0: int, p1: int, n_bytes: int) -> float:
    """Return the worth of a use: the work of evaluating tokens [p0, p1), divided by the bytes of their KV.

    Attention to 16k tokens is about as much work as the weights.
    """
    return (p1 - p0) * (1 + (p0 + p1) / 32768) / max(1, n_bytes)


def prepare(db: sqlite3.Connection) -> None:
    """Register the SQL functions that the statements here use."""
    db.create_function("worth_of_use", 3, worth_of_use, deterministic=True)


def note_uses(db: sqlite3.Connection, uses: Mapping[str, int]) -> None:
    """Count the uses of entries."""
    db.executemany(_ADD_USES, [{"entry": entry, "uses": n} for entry, n in uses.items()])


def note_evicted(db: sqlite3.Connection, entry: str) -> None:
    """Note that an entry was evicted, so that later entries are worth more than it was."""
    db.execute(_AGE, (entry,))
