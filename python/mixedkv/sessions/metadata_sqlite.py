"""Sessions in an SQLite file that several processes may share."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from mixedkv.sessions.metadata import (
    BESIDE_STORE,
    Held,
    Key,
    Listed,
    Outcome,
    Quota,
    RecordCodec,
    beside,
)
from mixedkv.sqlite_wal import WalConnection
from mixedkv.store.encryption import KeyCipher, KeySource
from mixedkv.store.tiers.disk import check_folder, inode, open_own

_LOG = logging.getLogger(__name__)
_VERSION = 1  # of the table, in PRAGMA user_version
_BUSY_SECONDS = 10.0
_MAGIC = b"SQLite format 3\x00"
_ROOT = 0  # whose folders nobody else can write to either
_T = TypeVar("_T")

_TABLES = """
CREATE TABLE IF NOT EXISTS sessions (
    tenant     TEXT NOT NULL,
    session_id TEXT NOT NULL,
    expires_at REAL NOT NULL,
    record     BLOB NOT NULL,
    PRIMARY KEY (tenant, session_id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS sessions_by_expiry ON sessions (expires_at);
"""


class SQLiteMetadata:
    """Sessions in the file `path`; "" keeps them in memory. A damaged file is set aside as `path`.damaged,
    and the sessions begin anew.

    Raises:
        ValueError: the file is no database, or one of a newer version.
        OSError: the file cannot be opened, or is not safe from other users.
    """

    def __init__(self, path: str) -> None:
        self._path = path or ":memory:"
        self._lock = threading.Lock()
        self._file = (0, 0)
        self._db: sqlite3.Connection | None = self._open_or_begin_anew()

    async def put(
        self,
        key: Key,
        record: bytes,
        expires_at: float,
        *,
        old: bytes | None = None,
        now: float = 0.0,
        quota: Quota | None = None,
    ) -> Outcome:
        values = (expires_at, record, *key)
        if old is None:
            sql = "INSERT INTO sessions (expires_at, record, tenant, session_id) VALUES (?, ?, ?, ?)"
            return await self._put(f"{sql} ON CONFLICT DO NOTHING", values, key.tenant, now, quota)
        sql = "UPDATE sessions SET expires_at = ?, record = ? WHERE tenant = ? AND session_id = ?"
        return await self._put(f"{sql} AND record = ?", (*values, old), key.tenant, now, quota)

    async def get(self, key: Key) -> bytes | None:
        rows = await self._rows("SELECT record FROM sessions WHERE tenant = ? AND session_id = ?", key)
        return rows[0][0] if rows else None

    async def remove(self, key: Key, old: bytes) -> bool:
        sql = "DELETE FROM sessions WHERE tenant = ? AND session_id = ? AND record = ?"
        return await asyncio.to_thread(self._locked, lambda db: db.execute(sql, (*key, old)).rowcount == 1)

    async def expired(self, now: float, limit: int) -> list[tuple[Key, bytes]]:
        rows = await self._rows(
            "SELECT tenant, session_id, record FROM sessions "
            "WHERE expires_at <= ? ORDER BY expires_at LIMIT ?",
            (now, limit),
        )
        return [(Key(tenant, session_id), record) for tenant, session_id, record in rows]

    async def keys(self) -> list[Key]:
        return [Key(*row) for row in await self._rows("SELECT tenant, session_id FROM sessions", ())]

    async def page(self, tenant: str, now: float, after: str, limit: int) -> list[Listed]:
        rows = await self._rows(
            "SELECT session_id, expires_at, LENGTH(record) FROM sessions "
            "WHERE tenant = ? AND session_id > ? AND expires_at > ? ORDER BY session_id LIMIT ?",
            (tenant, after, now, limit),
        )
        return [Listed(*row) for row in rows]

    async def held(self, now: float, tenant: str | None = None) -> Held:
        return await asyncio.to_thread(self._locked, lambda db: _held(db, now, tenant))

    async def forget(self) -> None:
        """Move the write-ahead log into the file, so that what was replaced is in neither."""
        await self._rows("PRAGMA wal_checkpoint(TRUNCATE)", ())

    async def close(self) -> None:
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    def _open_or_begin_anew(self) -> sqlite3.Connection:
        with self._errors():
            try:
                return self._open()
            except sqlite3.DatabaseError as error:
                if not self._is_damaged(error):
                    raise
                self._set_aside(error)
                return self._open()

    def _open(self) -> sqlite3.Connection:
        if self._path != ":memory:":  # prompts are in it: nobody else's to read
            check_folder(Path(self._path).absolute().parent, owners=(_ROOT,))
            open_own(Path(self._path)).close()
            self._file = inode(Path(self._path))
        # autocommit: every statement here is one transaction
        db = sqlite3.connect(
            self._path,
            timeout=_BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
            factory=WalConnection,
        )
        try:
            prepare(db, self._path, _VERSION, _TABLES)
            if self._path != ":memory:":
                db.watch(self._path)
        except BaseException:
            db.close()
            raise
        return db

    def _is_damaged(self, error: sqlite3.DatabaseError) -> bool:
        """Return whether an error says that a database is damaged, and not that the file never was one."""
        if self._path == ":memory:" or type(error) is not sqlite3.DatabaseError:  # others are subclasses
            return False
        with open(self._path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC or Path(self._path).name == BESIDE_STORE

    def _set_aside(self, error: Exception) -> None:
        text = "%s is damaged (%s): it is now %s.damaged, and there are no sessions"
        _LOG.warning(text, self._path, error, self._path)
        os.replace(self._path, f"{self._path}.damaged")
        for suffix in ("-wal", "-shm"):
            Path(f"{self._path}{suffix}").unlink(missing_ok=True)

    async def _put(
        self, sql: str, values: tuple[Any, ...], tenant: str, now: float, quota: Quota | None
    ) -> Outcome:
        """Run a statement that changes one row if the record is as expected: "conflict" if it changed none,
        "full" if the tenant would then hold more than its quota. Neither changes anything.
        """

        def change(db: sqlite3.Connection) -> Outcome:
            db.execute("BEGIN IMMEDIATE")
            outcome: Outcome = "conflict"
            try:
                if db.execute(sql, values).rowcount == 1:
                    fits = quota is None or _held(db, now, tenant).within(quota)
                    outcome = "done" if fits else "full"
            finally:
                db.execute("COMMIT" if outcome == "done" else "ROLLBACK")
            return outcome

        return await asyncio.to_thread(self._locked, change)

    async def _rows(self, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        return await asyncio.to_thread(self._locked, lambda db: db.execute(sql, values).fetchall())

    def _locked(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        with self._lock, self._errors():
            if self._db is None:
                raise OSError(f"{self._path} is closed")
            if self._path != ":memory:" and inode(Path(self._path)) != self._file:
                _LOG.warning("the session database was deleted or replaced: it is opened again")
                self._begin_again(self._db)
            try:
                return work(self._db)
            except sqlite3.DatabaseError as error:
                if not self._is_damaged(error):
                    raise
                self._set_aside(error)
                self._begin_again(self._db)
                return work(self._db)

    def _begin_again(self, old: sqlite3.Connection) -> None:
        """Make the file again, empty: deleting it while it is open deletes what is in it."""
        Path(self._path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._db = self._open()
        old.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.OperationalError, FileNotFoundError, PermissionError) as error:
            raise OSError(f"the session database {self._path} cannot be used: {error}") from error
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{self._path} is not a session database: {error}") from error


def _held(db: sqlite3.Connection, now: float, tenant: str | None) -> Held:
    one = " AND tenant = ?" if tenant is not None else ""
    query = f"SELECT COUNT(*), COALESCE(SUM(LENGTH(record)), 0) FROM sessions WHERE expires_at > ?{one}"
    return Held(*db.execute(query, (now, tenant) if tenant is not None else (now,)).fetchone())


def prepare(db: sqlite3.Connection, path: str, version: int, tables: str) -> None:
    """Make the tables where they are missing, and note the version of the file.

    Args:
        path: names the file in an error.
        version: of the tables that this release reads.
        tables: SQL that changes nothing when it is run again.

    Raises:
        ValueError: a later release wrote the file.
    """
    (found,) = db.execute("PRAGMA user_version").fetchone()
    if found > version:
        raise ValueError(f"{path} is of version {found}, this release reads {version}: upgrade mixedkv")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA secure_delete = ON")  # what is deleted is overwritten, not only unlinked
    db.executescript(tables)
    db.execute(f"PRAGMA user_version = {version}")


_ATTEMPTS = 16


def reseal(store: str | Path, old: KeySource, new: KeySource) -> int:
    """Encrypt the sessions beside a store with `new`; returns how many. Those that `old` does not read stay.

    Raises:
        OSError: they cannot be read or written.
    """
    path = beside(store)
    if not path.exists():
        return 0
    return asyncio.run(_reseal(path, RecordCodec(KeyCipher(old)), RecordCodec(KeyCipher(new))))


async def _reseal(path: Path, old: RecordCodec, new: RecordCodec) -> int:
    metadata, n = SQLiteMetadata(str(path)), 0
    try:
        for key in await metadata.keys():
            for _ in range(_ATTEMPTS):  # against other writers
                record = await metadata.get(key)
                session = None if record is None else old.load(key, record)
                if record is None or session is None:
                    break
                if await metadata.put(key, new.dump(session), session.expires_at, old=record) == "done":
                    n += 1
                    break
        await metadata.forget()
    finally:
        await metadata.close()
    return n
