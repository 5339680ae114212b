"""Sessions on the server's disk, each encrypted with a key that only its client keeps."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mixedkv.engine.connect.stored_rows import SequenceRows, StoredRows
from mixedkv.engine.engine import Engine
from mixedkv.errors import RowsGoneError
from mixedkv.split.session_key import Unwrapper
from mixedkv.split.sessions import Session
from mixedkv.store import Identity, KVStore, Share


@dataclass(frozen=True, slots=True)
class Kept:
    """The kept part of a session: ids of its tokens, and blocks of their rows."""

    ids: array[int]
    blocks: list[Any]
    tier: str


@dataclass(frozen=True, slots=True)
class Place:
    """A session's state when it was kept: its tokens, the running hash of them, and the precision of its
    vectors.
    """

    position: int
    running_hash: bytes
    precision: int


class KeptSessions:
    """A folder of a `KVStore`, opened with the key of one session at a time: nothing in it can be found or
    read with another one. Methods take milliseconds and more: not for the event loop.

    Args:
        folder: made if it is not there.
        max_gb: of all files, in 10^9 bytes; what was used the longest ago makes room.
        shares: what a tenant may have of it, by its name.
        max_age_seconds: sessions that were not used for so long are removed now; None keeps them.

    Raises:
        OSError: the folder cannot be used.
    """

    def __init__(
        self,
        folder: str | Path,
        max_gb: float,
        engine: Engine,
        shares: Callable[[str], Share],
        max_age_seconds: float | None = None,
    ) -> None:
        self._folder, self._max_gb, self._engine = Path(folder), max_gb, engine
        self._shares = shares
        self._unwrapper, self._rows = Unwrapper(), StoredRows(engine)
        self.public_key = self._unwrapper.public_key
        self._identity("")  # what cannot be used fails now, not later
        KVStore(
            self._folder,
            max_ram_bytes=0,
            max_kv_size_gb=max_gb,
            max_age_seconds=max_age_seconds,
            check_key=False,
        ).close()

    def keep(self, tenant: str, name: bytes, place: Place, session: Session, wrapped_key: bytes) -> int:
        """Store the rows of a session that stands at a place; how many tokens were not stored yet.

        Raises:
            ValueError: the key was not wrapped for this, or there is not enough room.
            RowsGoneError: the session has no rows any more.
            OSError: they cannot be written.
        """
        tokens = np.array(session.ids, np.int32)
        with self._store(name, wrapped_key) as store:
            identity = self._identity(tenant)
            before = store.find(identity, tokens)
            if before is None or before.n_tokens < len(tokens) or not before.exact:
                held = self._engine.call(lambda: self._held(session, tenant)).result()
                self._rows.put(store, identity, held)
            match = store.find(identity, tokens, exact_only=True)
            if match is None or match.n_tokens < len(tokens):
                raise RowsGoneError("its rows made room for others while they were stored")
            store.add_to_session(match, _filed(name, place))
            return len(tokens) - (before.n_tokens if before else 0)

    def find(self, tenant: str, name: bytes, place: Place, wrapped_key: bytes) -> Kept | None:
        """Return what was kept of a session when it stood at a place.

        Raises:
            ValueError: the key was not wrapped for this.
        """
        with self._store(name, wrapped_key) as store:
            match = store.find_session(self._identity(tenant), _filed(name, place), place.position)
            found = store.read_from(match) if match is not None and match.exact else None
        if match is None or found is None:
            return None
        blocks, tier = found
        return Kept(array("i", match.tokens.tobytes()), self._rows.cut(blocks), tier)

    def forget(self, tenant: str, name: bytes, wrapped_key: bytes) -> None:
        """Remove all that was kept with a key.

        Raises:
            ValueError: the key was not wrapped for this.
            OSError: it cannot be removed.
        """
        with self._store(name, wrapped_key) as store:
            for match in store.sequences(self._identity(tenant)):
                store.remove(match.links[0].entry)

    @contextmanager
    def _store(self, name: bytes, wrapped_key: bytes) -> Iterator[KVStore]:
        with (
            self._unwrapper.open(wrapped_key, name) as key,
            KVStore(
                self._folder,
                max_ram_bytes=0,
                max_kv_size_gb=self._max_gb,
                key=lambda: key,
                check_key=False,
                shares=self._share,
            ) as store,
        ):
            yield store

    def _share(self, tenant: str) -> Share:
        """Return the share of all sessions of a tenant together, whatever their keys."""
        owner = hashlib.sha256(b"split tenant" + tenant.encode()).digest()[:16]
        return replace(self._shares(tenant), owner=owner)

    def _held(self, session: Session, tenant: str) -> SequenceRows:
        """Return the session's rows if nothing has changed them; on the engine's thread."""
        seq = session.rows
        waits = seq is not None and seq.paused and seq.tenant == tenant and seq.tokens == session.ids
        if seq is None or not (waits and self._engine.pool.is_exact(seq)):
            raise RowsGoneError("its rows have gone")
        return SequenceRows(seq, seq.version, np.array(seq.tokens, np.int32))

    def _identity(self, tenant: str) -> Identity:
        return Identity.of(self._engine.llm, tenant=tenant, extra="split session")


def _filed(name: bytes, place: Place) -> str:
    """Return the name a session is filed under, besides its key: only who knows where it stood finds it."""
    return f"{name.hex()}.{place.position}.{place.running_hash.hex()}.{place.precision}"
