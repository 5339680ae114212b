"""A server's state of its clients' sessions: how long each is, its running hash, where its rows lie. Those on
disk are each encrypted with a key that only its client keeps.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mixedkv.engine.connectors.store_connector import SequenceRows, StoredRows
from mixedkv.engine.engine import Engine
from mixedkv.errors import RowsGoneError
from mixedkv.prefix.sequences import Sequence
from mixedkv.store import Identity, KVStore, Share
from mixedkv_split.session_key import Unwrapper


@dataclass(slots=True)
class Session:
    """Tokens that were evaluated for a client.

    Attributes:
        ids: one for each token, made of the running hash up to it; the engine tells rows apart by them.
        hashes: running hashes, the last one of all tokens, those before it of fewer.
        rows: the sequence they were left in; another job may have taken it since.
        busy: a step is at work.
    """

    precision: int
    hashes: deque[bytes]
    ids: array[int] = field(default_factory=lambda: array("i"))
    rows: Sequence | None = None
    busy: bool = False
    used_at: float = 0.0

    def __len__(self) -> int:
        return len(self.ids)

    def hash_at(self, position: int) -> bytes | None:
        """Return the running hash of the first `position` tokens; None if it is not known any more, or not
        yet.
        """
        back = len(self) - position
        return self.hashes[-1 - back] if 0 <= back < len(self.hashes) else None

    def go_on(self, position: int, ids: array[int], hashes: list[bytes]) -> None:
        """Replace all tokens by `ids`; the hashes are of those after `position`."""
        for _ in range(len(self) - position):
            self.hashes.pop()
        self.hashes += hashes
        self.ids = ids

    def drop(self, position: int, begin: int, end: int, running_hash: bytes) -> None:
        """Keep the first `position` tokens without those at [begin, end). There is no way back."""
        self.ids = self.ids[:position]
        del self.ids[begin:end]
        self.hashes.clear()
        self.hashes.append(running_hash)


class Sessions:
    """All sessions, the latest used last. For one thread.

    Args:
        most: of one tenant; the one used the longest ago makes room.
        seconds: that one is remembered after its last use.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._all: OrderedDict[tuple[str, bytes], Session] = OrderedDict()
        # ids are 31 bits of a hash: with a key that nobody knows, nobody can look for two that are the same
        self._key = secrets.token_bytes(32)

    def __len__(self) -> int:
        return len(self._all)

    def id_of(self, running_hash: bytes) -> int:
        digest = hashlib.blake2b(running_hash, digest_size=4, key=self._key).digest()
        return int.from_bytes(digest, "little") & 0x7FFFFFFF

    def get(self, tenant: str, name: bytes) -> Session | None:
        session = self._all.get((tenant, name))
        if session is not None:
            self._all.move_to_end((tenant, name))
            session.used_at = time.monotonic()
        return session

    def add(self, tenant: str, name: bytes, session: Session) -> None:
        self._all[tenant, name] = session
        session.used_at = time.monotonic()

    def take(self, tenant: str, name: bytes) -> Session | None:
        return self._all.pop((tenant, name), None)

    def take_old(self, tenant: str) -> Iterator[tuple[str, Session]]:
        """Remove and yield sessions whose time is over, and those of the tenant that leave no place for one
        more.
        """
        now = time.monotonic()
        n = sum(owner == tenant for owner, _ in self._all)
        for (owner, name), session in list(self._all.items()):
            too_many = owner == tenant and n >= self._most
            if session.busy or not (too_many or now - session.used_at > self._seconds):
                continue
            n -= owner == tenant
            del self._all[owner, name]
            yield owner, session


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
