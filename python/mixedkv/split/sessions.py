"""A server's state of its clients' sessions: how long each is, its running hash, where its rows lie."""

from __future__ import annotations

import hashlib
import secrets
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from mixedkv.start.sequence import Sequence


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
