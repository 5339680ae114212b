"""Where sessions are written down: one protocol for SQLite and Redis.

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
