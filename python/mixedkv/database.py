"""Opens the SQLite files of chats and sessions."""

from __future__ import annotations

import sqlite3


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
