"""The entries of a store: index, files and memory together."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, RLock
from typing import Any

import numpy as np

from mixedkv.kv.block import KVBlock
from mixedkv.store import coverage
from mixedkv.store.encryption import Cipher, KeyCipher
from mixedkv.store.entry_row import NOBODY, EntryError, EntryRow, Owner, Reason
from mixedkv.store.eviction import Eviction, worth_of_use
from mixedkv.store.folder import StoreFolder, as_os_error, file_name
from mixedkv.store.identity import Identity
from mixedkv.store.index import Index, UseLog
from mixedkv.store.lookup import (
    BLOCK,
    Search,
    block_hashes,
    check_block,
    content_hash,
    sequence_of,
    stored_sequences,
)
from mixedkv.store.results import EntryInfo, GCResult, Match, Tier, Verified
from mixedkv.store.sealing import seal, unseal
from mixedkv.store.tiers.disk import FullDisk
from mixedkv.tokens import Tokens


@dataclass(slots=True)
class _Kept:
    block: KVBlock
    n_bytes: int
    value: float  # of one use
    uses: int
    priority: float


class RamTier:
    """Blocks by entry id, up to `max_bytes` in all. Thread-safe.

    Args:
        max_bytes: maximum size of all blocks.
        eviction: which block is evicted first, as in `KVStore`.
    """

    def __init__(self, max_bytes: int, eviction: Eviction = "lru") -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        self._eviction = eviction
        self._floor = 0.0  # priority of the last evicted block: later blocks are worth more
        self._blocks: OrderedDict[str, _Kept] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, entry: str) -> bool:
        return entry in self._blocks

    def get(self, entry: str) -> KVBlock | None:
        with self._lock:
            kept = self._blocks.get(entry)
            if kept is None:
                return None
            kept.uses += 1
            kept.priority = self._floor + kept.uses * kept.value
            if self._eviction == "lru":
                self._blocks.move_to_end(entry)
            return kept.block

    def put(self, entry: str, block: KVBlock) -> None:
        """Keep a block, unless it is larger than the budget."""
        n_bytes = block.nbytes
        if n_bytes > self.max_bytes:
            return
        with self._lock:
            self._drop(entry)
            while self.n_bytes + n_bytes > self.max_bytes:
                self._evict()
            value = worth_of_use(block.p0, block.p0 + len(block), n_bytes)
            self._blocks[entry] = _Kept(block, n_bytes, value, uses=1, priority=self._floor + value)
            self.n_bytes += n_bytes

    def remove(self, entry: str) -> None:
        with self._lock:
            self._drop(entry)

    def keep_only(self, entries: Collection[str]) -> None:
        """Drop all but `entries`: another process may have removed the others from the folder."""
        with self._lock:
            for entry in self._blocks.keys() - set(entries):
                self._drop(entry)

    def _evict(self) -> None:
        first = next(iter(self._blocks))
        if self._eviction == "gdsf":
            first = min(self._blocks, key=lambda entry: self._blocks[entry].priority)
        self._floor = max(self._floor, self._blocks[first].priority)
        self._drop(first)

    def _drop(self, entry: str) -> None:
        if kept := self._blocks.pop(entry, None):
            self.n_bytes -= kept.n_bytes


_LOG = logging.getLogger("mixedkv.store")
_TRIES = 16
_LISTED = ("id", "parent", "label", "p0", "p1", "nbytes", "created", "used")
_FORGET_SECONDS = 0.5  # seconds that a removal waits for readers of the index


class TooLargeError(ValueError):
    """An entry, with what it builds on, is larger than the whole budget."""


class Entries:
    """All entries of a store. Thread-safe. `counts` has bytes_read, bytes_written and evicted.

    Args:
        root: the folder, None for memory only.
        max_bytes: budget for all files, or for all blocks if the store is in memory only.
        max_ram_bytes: budget for blocks kept in memory.
        max_age_seconds: age since its last use at which an entry is removed; None keeps all.
        owner: returns the owner of the entries of an identity.
    """

    def __init__(
        self,
        root: Path | None,
        cipher: Cipher,
        *,
        max_bytes: int,
        max_ram_bytes: int,
        eviction: Eviction,
        max_age_seconds: float | None = None,
        owner: Callable[[Identity], Owner] = lambda identity: NOBODY,
    ) -> None:
        self._cipher, self._eviction, self._owner = cipher, eviction, owner
        self.max_bytes, self._max_age_seconds = max_bytes, max_age_seconds
        self.ram = RamTier(max_ram_bytes, eviction)
        self.counts: Counter[str] = Counter()
        self._lock = RLock()
        self._uses = UseLog()
        self.unerased = False
        self._full_disk = FullDisk()
        self._folder = StoreFolder(root)
        self._index = self._folder.open()
        with suppress(sqlite3.Error):
            self.unerased = not self._index.forget()

    def close(self) -> None:
        with self._lock, suppress(sqlite3.Error):
            self._uses.write(self._index)
            self._forget()
            self._index.close()

    def key_ids(self) -> set[str]:
        """Return the names of this store's master keys, "" for no key."""
        with self._lock, as_os_error():
            return self._index.key_ids()

    def adopt_key(self, *, note: bool = True) -> None:
        """Use the hashing key that the store had before this master key: names are found by it. Where the
        store does not know the master key, `note` makes it known.

        Raises:
            OSError: the index cannot be written, or its hashing key is damaged.
        """
        if not isinstance(self._cipher, KeyCipher):
            return
        with self._lock, as_os_error():
            hashing = self._index.hashing_key(self._cipher.key_id)
            if hashing is None:
                if note:
                    self._index.note_key(self._cipher.key_id, self._cipher.wrap_hashing_key())
                return
        try:
            self._cipher.unwrap_hashing_key(hashing)
        except EntryError as error:
            raise OSError(f"the index cannot be used: {error}") from None

    # --- reading ---

    def find(self, identity: Identity, tokens: Tokens, exact_only: bool) -> tuple[Match | None, Reason]:
        """Return the longest match, or None and the reason."""
        try:
            with self._lock:
                self._look()
            with self._lock, self._index.snapshot():
                search = Search(self._index, self._cipher, identity, tokens)
                match = search.find(exact_only)
            for entry, error in search.broken.items():
                self._remove_broken(entry, error)
            return match, search.reason
        except (sqlite3.Error, OSError) as error:
            _LOG.warning("the index cannot be read: %s", error)
            return None, "index"

    def sequences(self, identity: Identity, known: Collection[str]) -> list[Match]:
        """Return every stored sequence that no other continues, without those that end in a `known` entry."""
        try:
            with self._lock:
                self._look()
                with self._index.snapshot():
                    return stored_sequences(self._index, self._cipher, identity, known)
        except (sqlite3.Error, OSError) as error:
            _LOG.warning("the index cannot be read: %s", error)
            return []

    def session_match(self, identity: Identity, session: bytes, n_tokens: int) -> Match | None:
        """Return the first tokens of a session's stored sequence."""
        try:
            with self._lock:
                self._look()
                with self._index.snapshot():
                    entry = self._index.sessions.last_entry(identity.digest, session, n_tokens)
                    return sequence_of(self._index, self._cipher, identity, entry, n_tokens)
        except (sqlite3.Error, OSError) as error:
            _LOG.warning("the index cannot be read: %s", error)
            return None

    def sequence(self, identity: Identity, entry: str, n_tokens: int) -> Match | None:
        """Return the first tokens of the sequence that ends in an entry; None if it has fewer."""
        with suppress(sqlite3.Error, OSError), self._lock:
            return sequence_of(self._index, self._cipher, identity, entry, n_tokens)
        return None

    def read_rows(self, query: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        """Return the rows of a query of the index."""
        with self._lock, as_os_error():
            self._uses.write(self._index)
            return self._index.read_rows(query, values)

    def change(self, write: Callable[[sqlite3.Connection], None]) -> None:
        """Write to the index, in one transaction."""
        with self._lock, as_os_error():
            self._index.change(write)

    def read(self, match: Match, begin: int = 0) -> tuple[list[KVBlock], Tier]:
        """Read the blocks of a match, cut to it, without those that end before position `begin`. They count
        as used and stay in memory.

        Raises:
            EntryError: an entry cannot be used; it is removed with all that builds on it.
        """
        blocks: list[KVBlock] = []
        tier: Tier = "ram"
        links = [link for link in match.links if link.end > begin]
        for link in links:
            try:
                block = self.ram.get(link.entry)
                if block is None:
                    tier = "disk"
                    block = self._read_file(link.entry)
                    self.ram.put(link.entry, block)
                check_block(block, link, match)
            except EntryError as error:
                self._remove_broken(link.entry, error)
                raise
            blocks.append(block if link.end == block.p1 else block.slice(block.p0, link.end))
        self._uses.note(link.entry for link in links)
        return blocks, tier

    def _read_file(self, entry: str) -> KVBlock:
        try:
            with self._lock:
                row = self._index.get(entry)
        except sqlite3.Error as error:
            raise EntryError("index", f"the index cannot be read: {error}") from error
        if row is None or self._folder.disk is None:
            raise EntryError("missing", "it has been removed")
        with self._folder.disk.open(file_name(row)) as (file, size):
            block = unseal(self._cipher, row, file, size)
        with self._lock:
            self.counts["bytes_read"] += size
        return block

    # --- writing ---

    def write(
        self, identity: Identity, block: KVBlock, parent: Match | None, session: bytes | None
    ) -> tuple[str, bool]:
        """Store a block, unless one as good is there already; return the entry's id and whether it was
        stored.

        Raises:
            TooLargeError: it does not fit the budget.
            ParentGoneError: its parent has been removed.
            SessionRemovedError: its session has been removed.
            OSError: it cannot be written.
        """
        with self._lock:
            self._look()
        before = parent.tokens if parent else np.empty(0, np.int32)
        hashes = block_hashes(self._cipher, identity, np.concatenate([before, block.tokens]))
        content = content_hash(self._cipher, hashes, before, block.tokens)
        if session is not None:
            self.add_to_session(session, [link.entry for link in parent.links] if parent else [], identity)
        owner, kept = self._owner(identity), {link.entry for link in parent.links} if parent else set()

        def store(replaced: str | None) -> str:
            row, file = seal(
                self._cipher,
                identity,
                block,
                content,
                parent.entry if parent else None,
                on_disk=self._folder.disk is not None,
            )
            self._check_budget(row.nbytes, row.parent, owner)
            listed = hashes[block.p0 // BLOCK :]
            self._place(row, file, kept, lambda: self._insert(row, listed, owner, replaced, session))
            self.ram.put(row.id, block)
            return row.id

        try:
            for _ in range(_TRIES):
                with self._lock:
                    there = self._index.by_content(content)
                if there is not None and not coverage.is_better(identity, block, there.rows):
                    break
                # another thread or process may be storing the same entry, and a third may evict it
                with suppress(sqlite3.IntegrityError):
                    return store(there.id if there else None), True
            else:
                raise OSError("the index changes faster than it can be read")
        except sqlite3.Error as error:
            raise OSError(f"the index cannot be written: {error}") from error
        if session is not None:
            self.add_to_session(session, [there.id], identity)
        self._uses.note([there.id])
        return there.id, False

    def _place(
        self,
        row: EntryRow,
        file: Iterable[bytes | memoryview],
        kept: set[str],
        insert: Callable[[], None],
        durable: bool = True,
    ) -> None:
        """Write an entry's file, if there is a folder, and put its row into the index. If the disk is full,
        evict entries that are not in `kept`.
        """
        disk = self._folder.disk
        if disk is None:
            insert()
            return

        def publish() -> None:
            with disk.publish(file_name(row), file, durable):
                insert()

        self._full_disk.store(publish, lambda more: self._make_room(more, kept), row.nbytes)
        with self._lock:
            self.counts["bytes_written"] += row.nbytes

    def _make_room(self, size: int, kept: set[str]) -> bool:
        """Evict what a new entry needs; False if there is nothing to evict."""
        self._full_disk.warn_once()
        with self._lock:
            chosen: dict[str, int] = {}
            while sum(chosen.values()) < size:
                leaf = self._index.next_to_leave(self._eviction, kept | chosen.keys())
                if leaf is None:
                    break
                chosen[leaf[0]] = leaf[1]
            self._remove_files(chosen)  # files first, since without room even the index cannot change
            for entry in chosen:
                self._index.remove(entry, evicted=True)
            self.counts["evicted"] += len(chosen)
        return bool(chosen)

    def _check_budget(self, size: int, parent: str | None, owner: Owner) -> None:
        """Refuse an entry that does not fit together with all that it builds on, as these cannot leave before
        it.
        """
        with self._lock:
            n_bytes = size + (self._index.chain_bytes(parent) if parent else 0)
        most = self.max_bytes if owner.max_bytes is None else min(self.max_bytes, owner.max_bytes)
        if n_bytes > most:
            raise TooLargeError(f"{n_bytes} bytes are more than the budget of {most}")

    def _insert(
        self, row: EntryRow, hashes: list[bytes], owner: Owner, replaced: str | None, session: bytes | None
    ) -> None:
        with self._lock:
            self._uses.write(self._index)
            evicted = self._index.insert(
                row,
                hashes,
                max_bytes=self.max_bytes,
                eviction=self._eviction,
                owner=owner,
                replaced=replaced,
                session=session,
            )
            self.counts["evicted"] += len(evicted)
            if self.unerased:
                self.unerased = not self._index.forget()
        self._remove_files([replaced, *evicted] if replaced else evicted)

    def add_to_session(self, session: bytes, entries: Iterable[str], identity: Identity) -> None:
        with self._lock, as_os_error():
            self._index.add_to_session(session, entries, self._owner(identity).sessions)

    # --- removing ---

    def remove(self, entry: str) -> int:
        """Remove an entry and all that builds on it; return how many entries."""
        return self._remove_from(lambda index: index.remove(entry))

    def remove_session(self, session: bytes) -> int:
        """Remove the entries that belong to a session alone; return how many."""
        return self._remove_from(lambda index: index.remove_session(session))

    def remove_orphans(self, owner: bytes, living: set[bytes], before: float) -> int:
        """Remove an owner's sessions that are not `living`; return how many."""
        with self._lock, as_os_error():
            gone = [name for name in self._index.sessions.of_owner(owner, before) if name not in living]
        for session in gone:
            self.remove_session(session)
        return len(gone)

    def _remove_from(self, remove: Callable[[Index], list[str]]) -> int:
        with self._lock, as_os_error():
            removed = remove(self._index)
        self._remove_files(removed)
        with as_os_error():
            self._forget(_FORGET_SECONDS)
        return len(removed)

    def _forget(self, seconds: float = 0.0) -> None:
        """Erase removed rows from the index's log. If another program reads the index, that is tried again
        with the next change.
        """
        until = time.monotonic() + seconds
        while True:
            with self._lock:
                self.unerased = not self._index.forget()
            if not self.unerased or time.monotonic() >= until:
                break
            time.sleep(0.02)
        if self.unerased:
            _LOG.warning("another program reads the index: keys of removed entries are erased later")

    def _remove_broken(self, entry: str, error: EntryError) -> None:
        """Remove an entry that failed to be read, so that it can be stored again."""
        _LOG.warning("stored entry %s is not used: %s", entry, error)
        if error.reason == "index":
            return
        with suppress(sqlite3.Error, OSError):
            with self._lock:
                removed = self._index.remove(entry)
            self._remove_files([entry, *removed])

    def _remove_files(self, entries: Iterable[str]) -> None:
        """Remove files, after their rows: a row without a file is a miss, but a file without a row would
        stay.
        """
        for entry in entries:
            self.ram.remove(entry)
            self._folder.remove(entry)

    def _expire(self) -> list[str]:
        if self._max_age_seconds is None:
            return []
        expired = self._index.expire(time.time() - self._max_age_seconds)
        self.counts["expired"] += len(expired)
        return expired

    # --- looking after it ---

    def list(self) -> list[EntryInfo]:
        """Return all entries, last used first."""
        with self._lock, as_os_error():
            self._uses.write(self._index)
            rows, sessions = self._index.entries(), self._index.sessions.counts()
        return [
            EntryInfo(
                **{name: getattr(row, name) for name in _LISTED},
                encrypted=bool(row.key_id),
                n_sessions=sessions.get(row.id, 0),
                in_ram=row.id in self.ram,
            )
            for row in rows
        ]

    def totals(self) -> tuple[int, int]:
        """Return the number of entries, and the bytes of their files."""
        with self._lock, as_os_error():
            return self._index.totals()

    def verify(self) -> Verified:
        """Read every file; what is damaged is removed."""
        damaged: dict[str, str] = {}
        unreadable: list[str] = []
        whole = 0
        with self._lock, as_os_error():
            rows = self._index.entries()
        for row in rows:
            if row.key_id != self._cipher.key_id:
                unreadable.append(row.id)
                continue
            try:
                if self._folder.disk is not None:
                    self._read_file(row.id)
                whole += 1
            except EntryError as error:
                damaged[row.id] = str(error)
                self._remove_broken(row.id, error)
        return Verified(n_whole=whole, damaged=damaged, unreadable=tuple(unreadable))

    def collect(self) -> GCResult:
        """Remove entries over the budget and files that were left behind."""
        with self._lock, as_os_error():
            self._uses.write(self._index)
            unfinished, orphans, missing = self._folder.tidy(self._index)
            expired = self._expire()
            evicted = self._index.evict(self.max_bytes, self._eviction)
            self.counts["evicted"] += len(evicted)
            self.ram.keep_only(self._index.ids())
        self._remove_files([*expired, *evicted])
        with as_os_error():
            self._forget(_FORGET_SECONDS)
        return GCResult(
            n_unfinished=unfinished,
            n_orphans=orphans,
            n_missing=missing,
            n_expired=len(expired),
            n_evicted=len(evicted),
        )

    def remove_expired(self) -> int:
        """Remove entries that were not used for `max_age_seconds`; return how many."""
        with self._lock, as_os_error():
            self._uses.write(self._index)
            expired = self._expire()
        self._remove_files(expired)
        return len(expired)

    def _look(self) -> None:
        """Make the folder again, empty, if it was deleted while open.

        Raises:
            OSError: the folder cannot be made.
        """
        if self._folder.is_there():
            return
        _LOG.warning("the store's folder was deleted or replaced: it is opened again")
        old, self._index = self._index, self._folder.open()
        self.ram.keep_only(self._index.ids())
        with suppress(sqlite3.Error):
            old.close()
        self.adopt_key()
