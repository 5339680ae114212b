"""Protocol of the places where sessions are written down, for SQLite and Redis.

A store of metadata keeps bytes under a name and knows when they expire; what the bytes mean, and that an
expired session is an unknown one, is the manager's business. Every change is compare-and-swap, so several
processes may share a store.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple, Protocol

Outcome = Literal["done", "conflict", "full"]  # there is another record, or it would be over the quota

BESIDE_STORE = "sessions.sqlite3"  # name of the file in a store's folder, which is ours whatever is in it


class Key(NamedTuple):
    tenant: str
    session_id: str


class Quota(NamedTuple):
    """Limits of a tenant's sessions: how many, and bytes of their records."""

    sessions: int
    nbytes: int


class Held(NamedTuple):
    """Number of sessions, and bytes of their records."""

    sessions: int
    nbytes: int

    def within(self, quota: Quota) -> bool:
        return self.sessions <= quota.sessions and self.nbytes <= quota.nbytes


class Listed(NamedTuple):
    """A session, without what is in it."""

    session_id: str
    expires_at: float
    nbytes: int


class MetadataStore(Protocol):
    """All methods raise OSError when the store cannot be reached. With `now` only records that have not
    expired by then count.
    """

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
        """File a record in the place of `old`, None for none; "conflict" if there is another, expired or
        not.
        """

    async def get(self, key: Key) -> bytes | None:
        """Return the record, expired or not."""

    async def remove(self, key: Key, old: bytes) -> bool:
        """Remove `old`; False if the record is another one by now, or gone."""

    async def expired(self, now: float, limit: int) -> list[tuple[Key, bytes]]:
        """Return up to `limit` records with `expires_at <= now`, the oldest first."""

    async def keys(self) -> list[Key]:
        """Return the keys of all records, expired or not."""

    async def page(self, tenant: str, now: float, after: str, limit: int) -> list[Listed]:
        """Return up to `limit` sessions of a tenant by their ids, from the one after `after` on."""

    async def held(self, now: float, tenant: str | None = None) -> Held:
        """Return how much a tenant has; None is for all of them."""

    async def close(self) -> None:
        """Let go of the connection. Can be called again."""


def beside(store: str | Path) -> Path:
    """Return the file in which the sessions of a store are written down unless another place is named."""
    return Path(store).absolute() / BESIDE_STORE
