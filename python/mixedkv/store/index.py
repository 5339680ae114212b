"""The index of a store: one SQLite database that several processes may use at once.

An entry is a token range with a parent entry that covers the tokens before it. It is listed under the chained
hash of every block of tokens that it reaches into, see `lookup`.

Anyone who can write to the folder can put anything into the database. So a row that no writer can have
written is ignored.
"""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from mixedkv.sqlite_wal import WalConnection
from mixedkv.store import eviction as leaving
from mixedkv.store.entry_row import FIELDS, NOBODY, EntryRow, Owner, sound_row
from mixedkv.store.eviction import Eviction
from mixedkv.store.session_rows import SESSION_SCHEMA, SessionRows

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    id TEXT PRIMARY KEY,
    content BLOB NOT NULL UNIQUE,
    identity BLOB NOT NULL,
    label TEXT NOT NULL,
    parent TEXT,
    p0 INTEGER NOT NULL,
    p1 INTEGER NOT NULL,
    tokens BLOB NOT NULL,
    rows TEXT NOT NULL,
    nbytes INTEGER NOT NULL,
    key_id TEXT NOT NULL,
    key BLOB NOT NULL,
    created REAL NOT NULL,
    used REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS entries_identity ON entries (identity, key_id);
CREATE INDEX IF NOT EXISTS entries_parent ON entries (parent);
CREATE INDEX IF NOT EXISTS entries_used ON entries (used);
CREATE INDEX IF NOT EXISTS entries_created ON entries (created);
CREATE INDEX IF NOT EXISTS entries_nbytes ON entries (nbytes);
CREATE TABLE IF NOT EXISTS blocks (
    hash BLOB NOT NULL,
    entry TEXT NOT NULL REFERENCES entries (id) ON DELETE CASCADE
);
CREATE INDEX IF NOT EXISTS blocks_hash ON blocks (hash);
CREATE INDEX IF NOT EXISTS blocks_entry ON blocks (entry);
CREATE TABLE IF NOT EXISTS tenants (
    identity BLOB PRIMARY KEY,
    tenant BLOB NOT NULL,
    weight REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS keys (
    key_id TEXT PRIMARY KEY,
    hashing BLOB NOT NULL
) WITHOUT ROWID;
"""
_TREE = """
WITH RECURSIVE tree (id) AS (
    SELECT id FROM entries WHERE id = ?
    UNION SELECT entries.id FROM entries JOIN tree ON entries.parent = tree.id
) SELECT id FROM tree
"""
_CHAIN = """
WITH RECURSIVE chain (id, parent, nbytes) AS (
    SELECT id, parent, nbytes FROM entries WHERE id = ?
    UNION SELECT up.id, up.parent, up.nbytes FROM entries AS up JOIN chain ON up.id = chain.parent
) SELECT COALESCE(SUM(CAST(nbytes AS INTEGER)), 0) FROM chain
"""
_EXPIRED = """
SELECT id FROM entries AS leaf WHERE CAST(used AS REAL) < ?
    AND NOT EXISTS (SELECT 1 FROM entries AS child WHERE child.parent = leaf.id)
"""
_VARIABLES = 500  # variables in one statement; SQLite's limit used to be 999
_BUSY_SECONDS = 30.0
_COLUMNS = ", ".join(f"entries.{name}" for name in FIELDS)


class ParentGoneError(LookupError):
    """The parent of a new entry has been removed meanwhile."""


class Index:
    """One connection. Use it from one thread at a time. `sessions` are read and written by its methods."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._db = sqlite3.connect(
            path or ":memory:",
            timeout=_BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
            factory=WalConnection,
        )
        self.sessions = SessionRows(self._db)
        try:
            self._set_up()
        except BaseException:
            self._db.close()
            raise

    def _set_up(self) -> None:
        if self._path:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")  # stored entries survive a power cut
            self._db.watch(self._path)
        self._db.execute("PRAGMA secure_delete = ON")  # a removed data key leaves no copy in a free page
        self._db.execute("PRAGMA foreign_keys = ON")
        leaving.prepare(self._db)
        with self._transaction():
            for statement in (_SCHEMA + SESSION_SCHEMA + leaving.SCHEMA + MESSAGE_SCHEMA).split(";"):
                self._db.execute(statement)

    def close(self) -> None:
        self._db.close()

    # --- reading ---

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Hold a snapshot of the index: changes by others are not seen meanwhile."""
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute("ROLLBACK")

    def get(self, entry: str) -> EntryRow | None:
        return next(self._rows("FROM entries WHERE id = ?", entry), None)

    def by_content(self, content: bytes) -> EntryRow | None:
        return next(self._rows("FROM entries WHERE content = ?", content), None)

    def entries(self) -> list[EntryRow]:
        """Return all entries, last used first."""
        return list(self._rows("FROM entries ORDER BY used DESC, created DESC"))

    def contents(self) -> dict[str, bytes]:
        """Return the content hash of every entry by id."""
        return dict(self._db.execute("SELECT id, content FROM entries"))

    def ids(self) -> dict[str, int]:
        """Return the size of every entry's file by id."""
        return dict(self._db.execute("SELECT id, nbytes FROM entries"))

    def known(self, hashes: Sequence[bytes]) -> set[bytes]:
        """Return those of the hashes under which entries are listed."""
        found: set[bytes] = set()
        for begin in range(0, len(hashes), _VARIABLES):
            some = hashes[begin : begin + _VARIABLES]
            query = (
                f"WITH sought (hash) AS (VALUES {','.join(['(?)'] * len(some))}) SELECT hash FROM sought "
                "WHERE EXISTS (SELECT 1 FROM blocks WHERE blocks.hash = sought.hash)"
            )
            found.update(row[0] for row in self._db.execute(query, some))
        return found

    def candidates(self, block_hash: bytes, limit: int) -> list[str]:
        """Return the ids listed under a hash: the `limit` newest, and the `limit` oldest, which others build
        on.
        """
        query = "SELECT entry FROM blocks WHERE hash = ? ORDER BY rowid {} LIMIT ?"
        found = [self._db.execute(query.format(order), (block_hash, limit)) for order in ("DESC", "ASC")]
        return list(dict.fromkeys(entry for rows in found for (entry,) in rows))

    def has_other_key(self, identity: bytes, key_id: str) -> bool:
        """Return whether there are entries of this identity encrypted with another key, or with none."""
        query = "SELECT 1 FROM entries WHERE identity = ? AND key_id != ? LIMIT 1"
        return self._db.execute(query, (identity, key_id)).fetchone() is not None

    def key_ids(self) -> set[str]:
        """Return the names of the master keys of entries ("" for none) and of those that the store was opened
        with.
        """
        query = "SELECT key_id FROM entries UNION SELECT key_id FROM keys"
        return {str(key_id) for (key_id,) in self._db.execute(query)}

    def hashing_key(self, key_id: str) -> bytes | None:
        """Return the wrapped hashing key that is stored for a master key; None if there is none."""
        row = self._db.execute("SELECT hashing FROM keys WHERE key_id = ?", (key_id,)).fetchone()
        return None if row is None or not isinstance(row[0], bytes) else row[0]

    def next_to_leave(self, eviction: Eviction, keep: Iterable[str] = ()) -> tuple[str, int] | None:
        """Return the entry that leaves first, see `eviction.next_to_leave`: its id and its bytes."""
        return leaving.next_to_leave(self._db, eviction, keep)

    def leaves_of(self, identity: bytes) -> list[str]:
        """Return the ids of an identity's entries that no other continues at the end, the oldest first."""
        query = (
            "SELECT id FROM entries WHERE identity = ? AND NOT EXISTS "
            "(SELECT 1 FROM entries AS child WHERE child.parent = entries.id AND child.p0 >= entries.p1) "
            "ORDER BY created"
        )
        return [str(entry) for (entry,) in self._db.execute(query, (identity,))]

    def totals(self) -> tuple[int, int]:
        """Return the number of entries, and the bytes of their files."""
        query = "SELECT COUNT(*), COALESCE(SUM(CAST(nbytes AS INTEGER)), 0) FROM entries"
        count, n_bytes = self._db.execute(query).fetchone()
        return count, n_bytes

    def chain_bytes(self, entry: str) -> int:
        """Return the bytes of the files of an entry and of all it builds on."""
        return int(self._db.execute(_CHAIN, (entry,)).fetchone()[0])

    def read_rows(self, query: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        """Run a query of another module of the store and return its rows."""
        return list(self._db.execute(query, values))

    # --- writing ---

    def insert(
        self,
        row: EntryRow,
        hashes: Iterable[bytes],
        *,
        max_bytes: int,
        eviction: Eviction,
        owner: Owner = NOBODY,
        replaced: str | None = None,
        session: bytes | None = None,
    ) -> list[str]:
        """Add an entry and make room for it; return the ids of evicted entries.

        Args:
            owner: owner of the entry.
            replaced: an entry of the same content, whose place the new one takes.
            session: the session that the entry belongs to.

        Raises:
            ParentGoneError: its parent has been removed.
            SessionRemovedError: the session has been removed.
            sqlite3.IntegrityError: there is an entry with this content.
        """
        with self._transaction():
            if row.parent is not None and self.get(row.parent) is None:
                raise ParentGoneError(f"entry {row.parent} has been removed")
            sessions, messages = {session} if session is not None else set(), []
            if replaced is not None:
                sessions |= self.sessions.of_entry(replaced)
                messages = message_rows(self._db, replaced)
                self._delete([replaced])
                self._db.execute("UPDATE entries SET parent = ? WHERE parent = ?", (row.id, replaced))
            marks = ",".join("?" * len(FIELDS))
            self._db.execute(
                f"INSERT INTO entries ({', '.join(FIELDS)}) VALUES ({marks})",
                [getattr(row, name) for name in FIELDS],
            )
            leaving.note_uses(self._db, {row.id: 1})
            self._db.executemany("INSERT INTO blocks VALUES (?, ?)", [(h, row.id) for h in hashes])
            for member in sessions:
                self.sessions.join(member, [row.id], owner.sessions)
            put_message_rows(self._db, row.id, messages)
            self._db.execute(
                "INSERT INTO tenants VALUES (?, ?, ?) ON CONFLICT (identity) DO UPDATE SET "
                "tenant = excluded.tenant, weight = excluded.weight",
                (row.identity, owner.tenant, owner.weight),
            )
            evicted = self._evict_own(owner, eviction, keep=row.id)
            return evicted + self._evict(max_bytes, eviction, keep=row.id)

    def evict(self, max_bytes: int, eviction: Eviction) -> list[str]:
        """Remove entries until their files take at most `max_bytes`; return their ids."""
        with self._transaction():
            return self._evict(max_bytes, eviction, keep="")

    def expire(self, before: float) -> list[str]:
        """Remove entries last used before a time, unless one used since then builds on them; return their
        ids.
        """
        expired: list[str] = []
        with self._transaction():
            while leaves := [leaf[0] for leaf in self._db.execute(_EXPIRED, (before,))]:
                self._delete(leaves)
                expired += leaves
        return expired

    def _evict(self, max_bytes: int, eviction: Eviction, keep: str, tenant: bytes | None = None) -> list[str]:
        evicted: list[str] = []
        n_bytes = self.totals()[1] if tenant is None else leaving.tenant_bytes(self._db, tenant)
        while n_bytes > max_bytes and (leaf := leaving.next_to_leave(self._db, eviction, [keep], tenant)):
            leaving.note_evicted(self._db, leaf[0])
            self._delete([leaf[0]])
            evicted.append(leaf[0])
            n_bytes -= leaf[1]
        return evicted

    def _evict_own(self, owner: Owner, eviction: Eviction, keep: str) -> list[str]:
        """Evict what a tenant has beyond its own limit."""
        return [] if owner.max_bytes is None else self._evict(owner.max_bytes, eviction, keep, owner.tenant)

    def remove(self, entry: str, evicted: bool = False) -> list[str]:
        """Remove an entry and all that builds on it; return their ids."""
        with self._transaction():
            if evicted:
                leaving.note_evicted(self._db, entry)
            return self._remove_tree(entry)

    def remove_session(self, session: bytes) -> list[str]:
        """Remove entries that belong to this session alone, and all that builds on them; return their ids."""
        with self._transaction():
            return [gone for entry in self.sessions.remove(session) for gone in self._remove_tree(entry)]

    def add_to_session(self, session: bytes, entries: Iterable[str], owner: bytes = b"") -> None:
        """Add entries to a session, see `SessionRows.join`."""
        with self._transaction():
            self.sessions.join(session, entries, owner)

    def change(self, write: Callable[[sqlite3.Connection], None]) -> None:
        """Let another module of the store write, within one transaction."""
        with self._transaction():
            write(self._db)

    def note_key(self, key_id: str, hashing: bytes) -> None:
        """Note that the store is encrypted with this master key, even if it is empty."""
        with self._transaction():
            self._db.execute("INSERT OR IGNORE INTO keys VALUES (?, ?)", (key_id, hashing))

    def rekey(self, old: str, new: str, hashing: bytes, wrap: Callable[[EntryRow], bytes]) -> int:
        """Change the master key; `wrap` returns the newly wrapped data key of each entry. Return the number
        of entries.
        """
        with self._transaction():
            rows = list(self._rows("FROM entries WHERE key_id = ?", old))
            self._db.executemany(
                "UPDATE entries SET key_id = ?, key = ? WHERE id = ?",
                [(new, wrap(row), row.id) for row in rows],
            )
            self._db.execute("DELETE FROM keys WHERE key_id = ?", (old,))
            self._db.execute("INSERT OR REPLACE INTO keys VALUES (?, ?)", (new, hashing))
        return len(rows)

    def touch(self, used: dict[str, float], uses: Mapping[str, int]) -> None:
        """Note when entries were last used, and how often since the last call."""
        if used:
            with self._transaction():
                self._db.executemany(
                    "UPDATE entries SET used = MAX(used, ?) WHERE id = ?",
                    [(when, entry) for entry, when in used.items()],
                )
                leaving.note_uses(self._db, uses)

    def forget(self) -> bool:
        """Move the write-ahead log into the database, so that removed rows are in neither.

        Return False if another program is reading the database; it is not waited for.
        """
        if not self._path:
            return True
        self._db.execute("PRAGMA busy_timeout = 0")
        try:
            busy, _, _ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            self._db.execute(f"PRAGMA busy_timeout = {int(1000 * _BUSY_SECONDS)}")
        return not busy

    def _remove_tree(self, entry: str) -> list[str]:
        tree = [found for (found,) in self._db.execute(_TREE, (entry,))]
        self._delete(tree)
        return tree

    def _delete(self, entries: list[str]) -> None:
        self._db.executemany("DELETE FROM entries WHERE id = ?", [(entry,) for entry in entries])

    def _rows(self, rest: str, *values: object) -> Iterator[EntryRow]:
        for row in self._db.execute(f"SELECT {_COLUMNS} {rest}", values):
            entry = sound_row(row)
            if entry is not None:
                yield entry

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


class UseLog:
    """The entries that were used since the last change. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._used: dict[str, float] = {}
        self._uses: Counter[str] = Counter()

    def note(self, entries: Iterable[str]) -> None:
        named = list(entries)
        with self._lock:
            self._used.update(dict.fromkeys(named, time.time()))
            self._uses.update(named)

    def write(self, index: Index) -> None:
        with self._lock:
            used, self._used = self._used, {}
            uses, self._uses = self._uses, Counter()
        index.touch(used, uses)


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
