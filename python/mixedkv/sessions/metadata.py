"""Where sessions are written down: one protocol, in SQLite by default and in Redis by URL.

A store of metadata keeps bytes under a name and knows when they expire; what the bytes mean, and that an
expired session is an unknown one, is the manager's business. Every change is compare-and-swap, so several
processes may share a store.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Key(NamedTuple):
    tenant: str
    session_id: str


class MetadataStore(Protocol):
    """All methods raise OSError when the store cannot be reached."""

    async def add(self, key: Key, record: bytes, expires_at: float) -> bool:
        """File a record; False if there is one, expired or not."""

    async def get(self, key: Key) -> bytes | None:
        """The record, expired or not."""

    async def replace(self, key: Key, old: bytes, new: bytes, expires_at: float) -> bool:
        """Put `new` in the place of `old`; False if the record is another one by now, or gone."""

    async def remove(self, key: Key, old: bytes) -> bool:
        """Remove `old`; False if the record is another one by now, or gone."""

    async def expired(self, now: float, limit: int) -> list[tuple[Key, bytes]]:
        """Up to `limit` records with `expires_at <= now`, the oldest first."""

    async def close(self) -> None:
        """Let go of the connection. Can be called again."""


def open_metadata(url: str) -> MetadataStore:
    """A store by its URL.

    "sqlite:PATH" is a file, "sqlite:" alone lives in memory as long as this process; "redis://...",
    "rediss://..." and "unix://..." are what the `redis` package understands.

    Raises:
        ValueError: the URL names no store known here.
        ImportError: the `redis` package is not installed.
    """
    scheme = url.partition(":")[0].lower()
    if scheme == "sqlite" and ":" in url:
        from mixedkv.sessions.metadata_sqlite import SQLiteMetadata

        path = url[len("sqlite:") :]
        return SQLiteMetadata(path[2:] if path.startswith("///") else path)
    if scheme in ("redis", "rediss", "unix"):
        from mixedkv.sessions.metadata_redis import RedisMetadata

        return RedisMetadata(url)
    raise ValueError(
        f"the metadata URL starts with {scheme[:20]!r}: "
        f"use sqlite:PATH, redis://..., rediss://... or unix://..."
    )
