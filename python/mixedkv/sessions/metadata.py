"""Protocol of the places where sessions are written down, for SQLite and Redis, and the form of their
records: JSON after a line that says so, or that encrypted.

A store of metadata keeps bytes under a name and knows when they expire; what the bytes mean, and that an
expired session is an unknown one, is the manager's business. Every change is compare-and-swap, so several
processes may share a store.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from pydantic import ValidationError

from mixedkv.sessions.records import CacheSessionMetadata
from mixedkv.store.encryption import Cipher, PlainCipher
from mixedkv.store.entry_row import EntryError

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


logger = logging.getLogger(__name__)

_PLAIN = b"mixedkv-session 1\n"
_SEALED = b"mixedkv-session 1 sealed\n"


class RecordCodec:
    """From a session to bytes and back.

    Args:
        cipher: of a store; with a key what is written is encrypted. What was written before it had one is
            still read.
    """

    def __init__(self, cipher: Cipher) -> None:
        self._cipher = cipher

    def dump(self, metadata: CacheSessionMetadata) -> bytes:
        text = metadata.model_dump_json(exclude_none=True).encode()
        key = Key(metadata.tenant, metadata.session_id)
        return _PLAIN + text if self._is_plain else _SEALED + self._cipher.seal_alone(text, _context(key))

    def load(self, key: Key, record: bytes) -> CacheSessionMetadata | None:
        """Return the record, or None for what is not a record of this session, or is encrypted with another
        key: the place where sessions are written down may hold anything.
        """
        try:
            metadata = CacheSessionMetadata.model_validate_json(self._text(key, record))
            if (metadata.tenant, metadata.session_id) != key:
                raise ValueError("filed under another name")
        except (ValueError, EntryError) as error:
            reason = "bad fields" if isinstance(error, ValidationError) else error
            logger.warning("a session record cannot be read and counts as unknown: %s", reason)
            return None
        return metadata

    @property
    def _is_plain(self) -> bool:
        return not self._cipher.key_id

    def _text(self, key: Key, record: bytes) -> bytes:
        if record.startswith(_PLAIN):
            return record[len(_PLAIN) :]
        if not record.startswith(_SEALED):
            raise ValueError("unknown format")
        if self._is_plain:
            raise ValueError("encrypted with a key: give it")
        return self._cipher.unseal_alone(record[len(_SEALED) :], _context(key))


PLAIN = RecordCodec(PlainCipher())


def _context(key: Key) -> bytes:
    """Write a key as bytes. The tenant's length in front keeps keys of two tenants apart."""
    return f"session {len(key.tenant)} {key.tenant} {key.session_id}".encode()
