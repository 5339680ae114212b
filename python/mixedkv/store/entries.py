"""The entries of a store: index, files and memory together."""

from __future__ import annotations

import logging
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock

import numpy as np

from mixedkv.kv.block import KVBlock
from mixedkv.store import coverage
from mixedkv.store.encryption import Cipher, decrypt, encrypt, encrypted_size
from mixedkv.store.entry_error import EntryError, Reason
from mixedkv.store.formats.native import decode, encode
from mixedkv.store.identity import FORMAT_VERSION, Identity
from mixedkv.store.index import EntryRow, Eviction, Index, ParentGoneError, SessionRemovedError
from mixedkv.store.lookup import (
    BLOCK,
    Search,
    block_hashes,
    content_hash,
    key_context,
    token_context,
)
from mixedkv.store.results import EntryInfo, GCResult, Link, Match, Tier, Verified
from mixedkv.store.tiers.disk import DiskTier, folder_lock, is_full, make_own_folder, open_own, read_all
from mixedkv.store.tiers.ram import RamTier
from mixedkv.tokens import Tokens

_LOG = logging.getLogger("mixedkv.store")
_FORGET_SECONDS = 0.5  # that a removal waits for those who read the index


class TooLargeError(ValueError):
    """An entry, with what it builds on, is larger than the whole budget."""


def store_root(folder: str | Path) -> Path:
    """Where in a folder this version of the format lives; another version leaves it alone."""
    return Path(folder) / f"v{FORMAT_VERSION}"


class Entries:
    """Thread-safe. `counts` has bytes_read, bytes_written and evicted.

    Args:
        root: the folder, None for memory only.
        max_bytes: of all files, or in memory only of all blocks.
        max_ram_bytes: of the blocks kept in memory.
    """

    def __init__(
        self, root: Path | None, cipher: Cipher, *, max_bytes: int, max_ram_bytes: int, eviction: Eviction
    ) -> None:
        self._root, self._cipher, self._eviction = root, cipher, eviction
        self.max_bytes = max_bytes
        self.ram = RamTier(max_ram_bytes)
        self.counts: Counter[str] = Counter()
        self._lock = RLock()
        self._used: dict[str, float] = {}
        self.unerased = False
        self._told_full = False
        if root is not None:
            make_own_folder(root)
        self._disk = DiskTier(root / "entries") if root else None
        self._tidied = (0, 0, 0)
        self._index = self._open()

    def close(self) -> None:
        with self._lock, suppress(sqlite3.Error):
            self._note_used()
            self._forget()
            self._index.close()

    def key_ids(self) -> set[str]:
        """Names of the master keys that entries are encrypted with, "" for none."""
        with self._lock, _as_os_error():
            return self._index.key_ids()

    # --- reading ---

    def find(self, identity: Identity, tokens: Tokens, exact_only: bool) -> tuple[Match | None, Reason]:
        """The longest match, or None and the reason."""
        try:
            with self._lock, self._index.snapshot():
                search = Search(self._index, self._cipher, identity, tokens)
                match = search.find(exact_only)
            for entry, error in search.broken.items():
                self._remove_broken(entry, error)
            return match, search.reason
        except sqlite3.Error as error:
            _LOG.warning("the index cannot be read: %s", error)
            return None, "index"

    def read(self, match: Match) -> tuple[list[KVBlock], Tier]:
        """The blocks of a match, cut to it.

        Raises:
            EntryError: one cannot be used. It and what builds on it are removed.
        """
        blocks: list[KVBlock] = []
        tier: Tier = "ram"
        for link in match.links:
            try:
                block = self.ram.get(link.entry)
                if block is None:
                    tier = "disk"
                    block = self._read_file(link.entry)
                    self.ram.put(link.entry, block)
                _check_tokens(block, link, match)
            except EntryError as error:
                self._remove_broken(link.entry, error)
                raise
            blocks.append(block if link.end == block.p1 else block.slice(block.p0, link.end))
        self._use(link.entry for link in match.links)
        return blocks, tier

    def _read_file(self, entry: str) -> KVBlock:
        try:
            with self._lock:
                row = self._index.get(entry)
        except sqlite3.Error as error:
            raise EntryError("index", f"the index cannot be read: {error}") from error
        if row is None or self._disk is None:
            raise EntryError("missing", "it has been removed")
        if row.key_id != self._cipher.key_id:
            raise EntryError("key", "it is encrypted with another master key, or with none")
        with self._disk.open(_file_name(row)) as (file, size):
            if size != row.nbytes:
                raise EntryError("damaged", f"its file has {size} bytes, not {row.nbytes}")
            if row.key_id:
                key = self._cipher.open_key(row.key, key_context(row.identity, row.id))
                data = decrypt(key, file, size, _file_context(row.identity, row.id))
            else:
                data = read_all(file, size)
        block = decode(data, identity=row.identity, entry=row.id, trusted=bool(row.key_id))
        if coverage.to_text(coverage.of_block(block)) != row.rows:
            raise EntryError("damaged", "its file has other rows than the index says")
        with self._lock:
            self.counts["bytes_read"] += size
        return block

    # --- writing ---

    def write(
        self, identity: Identity, block: KVBlock, parent: Match | None, session: bytes | None
    ) -> tuple[str, bool]:
        """The id of the entry for a block, and whether it was stored: not if one as good is there already.

        Raises:
            TooLargeError: it does not fit the budget.
            ParentGoneError: its parent has been removed.
            SessionRemovedError: its session has been removed.
            OSError: it cannot be written.
        """
        before = parent.tokens if parent else np.empty(0, np.int32)
        hashes = block_hashes(self._cipher, identity, np.concatenate([before, block.tokens]))
        content = content_hash(self._cipher, hashes, before, block.tokens)
        if session is not None:
            self.add_to_session(session, [link.entry for link in parent.links] if parent else [])
        try:
            with self._lock:
                row = self._index.by_content(content)
            if row is None or _is_better(identity, block, row):
                return self._write(identity, block, parent, session, row, content, hashes), True
        except sqlite3.IntegrityError:  # another thread or process has just stored the same
            with self._lock:
                row = self._index.by_content(content)
            if row is None:
                raise OSError("the index changes faster than it can be read") from None
        except sqlite3.Error as error:
            raise OSError(f"the index cannot be written: {error}") from error
        if session is not None:
            self.add_to_session(session, [row.id])
        self._use([row.id])
        return row.id, False

    def _write(
        self,
        identity: Identity,
        block: KVBlock,
        parent: Match | None,
        session: bytes | None,
        replaced: EntryRow | None,
        content: bytes,
        hashes: list[bytes],
    ) -> str:
        entry, key_id = secrets.token_hex(16), self._cipher.key_id
        key, wrapped = self._cipher.new_key(key_context(identity.digest, entry))
        rows = coverage.to_text(coverage.of_block(block))
        sealed = token_context(identity.digest, entry, content, rows)
        pieces = encode(block, identity=identity.digest, entry=entry)
        size = sum(map(len, pieces))
        if self._disk is None:
            size = block.nbytes
        elif key_id:
            size = encrypted_size(size)
        self._check_budget(size, parent)
        row = EntryRow(
            id=entry,
            content=content,
            identity=identity.digest,
            label=identity.label,
            parent=parent.entry if parent else None,
            p0=block.p0,
            p1=block.p1,
            tokens=self._cipher.seal(key, block.tokens.astype("<i4").tobytes(), sealed),
            rows=rows,
            nbytes=size,
            key_id=key_id,
            key=wrapped,
            created=(now := time.time()),
            used=now,
        )
        listed = hashes[block.p0 // BLOCK :]
        old = replaced.id if replaced else None
        if self._disk is None:
            self._insert(row, listed, old, session)
        else:
            context = _file_context(identity.digest, entry)
            while True:
                data = encrypt(key, pieces, context) if key_id else pieces
                try:
                    with self._disk.publish(_file_name(row), data):
                        self._insert(row, listed, old, session)
                    break
                except (OSError, sqlite3.OperationalError) as error:
                    if not (is_full(error) and self._make_room(size, parent)):
                        raise
            with self._lock:
                self.counts["bytes_written"] += size
        self.ram.put(entry, block)
        return entry

    def _make_room(self, size: int, parent: Match | None) -> bool:
        """Evict what a new entry needs; False if there is nothing to evict."""
        if not self._told_full:
            self._told_full = True
            _LOG.warning("the disk is full before the store is: entries are evicted for new ones")
        kept = {link.entry for link in parent.links} if parent else set()
        with self._lock:
            chosen: dict[str, int] = {}
            for row in self._index.leaves(self._eviction):
                if row.id not in kept and sum(chosen.values()) < size:
                    chosen[row.id] = row.nbytes
            self._remove_files(chosen)  # first: without room not even the index can change
            for entry in chosen:
                self._index.remove(entry)
            self.counts["evicted"] += len(chosen)
        return bool(chosen)

    def _check_budget(self, size: int, parent: Match | None) -> None:
        """An entry and what it builds on must fit together: none of them can leave before the others."""
        with self._lock:
            n_bytes = size + (self._index.chain_bytes(parent.entry) if parent else 0)
        if n_bytes > self.max_bytes:
            raise TooLargeError(f"{n_bytes} bytes are more than the budget of {self.max_bytes}")

    def _insert(
        self, row: EntryRow, hashes: list[bytes], replaced: str | None, session: bytes | None
    ) -> None:
        with self._lock:
            self._note_used()
            evicted = self._index.insert(
                row,
                hashes,
                max_bytes=self.max_bytes,
                eviction=self._eviction,
                replaced=replaced,
                session=session,
            )
            self.counts["evicted"] += len(evicted)
            if self.unerased:
                self.unerased = not self._index.forget()
        self._remove_files([replaced, *evicted] if replaced else evicted)

    def add_to_session(self, session: bytes, entries: Iterable[str]) -> None:
        with self._lock, _as_os_error():
            self._index.add_to_session(session, entries)

    # --- removing ---

    def remove(self, entry: str) -> int:
        """Remove an entry and what builds on it; how many."""
        return self._remove_from(lambda index: index.remove(entry))

    def remove_session(self, session: bytes) -> int:
        """Remove what belongs to a session alone; how many entries."""
        return self._remove_from(lambda index: index.remove_session(session))

    def _remove_from(self, remove: Callable[[Index], list[str]]) -> int:
        with self._lock, _as_os_error():
            removed = remove(self._index)
        self._remove_files(removed)
        with _as_os_error():
            self._forget(_FORGET_SECONDS)
        return len(removed)

    def _forget(self, seconds: float = 0.0) -> None:
        """Who reads the index keeps what was removed in its log; it is tried again with the next change."""
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
        """An entry that failed to be read goes, so that it can be stored again."""
        _LOG.warning("stored entry %s is not used: %s", entry, error)
        if error.reason == "index":
            return
        with suppress(sqlite3.Error, OSError):
            with self._lock:
                removed = self._index.remove(entry)
            self._remove_files([entry, *removed])

    def _remove_files(self, entries: Iterable[str]) -> None:
        """After their rows: a row without its file is a miss, a file without its row would stay."""
        for entry in entries:
            self.ram.remove(entry)
            if self._disk is not None:
                for suffix in _SUFFIXES.values():
                    self._disk.remove(f"{entry}{suffix}")

    # --- looking after it ---

    def list(self) -> list[EntryInfo]:
        """All entries, last used first."""
        with self._lock, _as_os_error():
            self._note_used()
            rows, sessions = self._index.entries(), self._index.sessions()
        return [
            EntryInfo(
                id=row.id,
                parent=row.parent,
                label=row.label,
                p0=row.p0,
                p1=row.p1,
                nbytes=row.nbytes,
                created=row.created,
                used=row.used,
                encrypted=bool(row.key_id),
                n_sessions=sessions.get(row.id, 0),
                in_ram=row.id in self.ram,
            )
            for row in rows
        ]

    def totals(self) -> tuple[int, int]:
        """Entries, and bytes of their files."""
        with self._lock, _as_os_error():
            return self._index.totals()

    def verify(self) -> Verified:
        """Read every file; what is damaged is removed."""
        damaged: dict[str, str] = {}
        unreadable: list[str] = []
        whole = 0
        with self._lock, _as_os_error():
            rows = self._index.entries()
        for row in rows:
            if row.key_id != self._cipher.key_id:
                unreadable.append(row.id)
                continue
            try:
                if self._disk is not None:
                    self._read_file(row.id)
                whole += 1
            except EntryError as error:
                damaged[row.id] = str(error)
                self._remove_broken(row.id, error)
        return Verified(n_whole=whole, damaged=damaged, unreadable=tuple(unreadable))

    def collect(self) -> GCResult:
        """Remove what is over the budget and what was left behind; opening has begun with that."""
        with self._lock, _as_os_error():
            self._note_used()
            found = zip(self._tidied, self._tidy(self._index), strict=True)
            unfinished, orphans, missing = map(sum, found)
            self._tidied = (0, 0, 0)
            evicted = self._index.evict(self.max_bytes, self._eviction)
            self.counts["evicted"] += len(evicted)
            self.ram.keep_only(self._index.ids())
        self._remove_files(evicted)
        with _as_os_error():
            self._forget(_FORGET_SECONDS)
        return GCResult(n_unfinished=unfinished, n_orphans=orphans, n_missing=missing, n_evicted=len(evicted))

    def _open(self) -> Index:
        if self._root is None:
            return Index(None)
        path = self._root / "index.sqlite3"
        with folder_lock(self._root / "lock"):
            try:
                index = self._open_index(path)
            except sqlite3.OperationalError as error:
                raise OSError(f"{path}: {error}") from error
            except sqlite3.DatabaseError as error:
                _LOG.warning("%s is damaged (%s): the store starts empty", path, error)
                for suffix in ("", "-wal", "-shm"):
                    Path(f"{path}{suffix}").unlink(missing_ok=True)
                index = self._open_index(path)
        return index

    def _open_index(self, path: Path) -> Index:
        open_own(path).close()  # with the mode that its log and its index take from it
        index = Index(path)
        try:
            self._tidied = self._tidy(index)
            self.unerased = not index.forget()
        except BaseException:
            index.close()
            raise
        return index

    def _tidy(self, index: Index) -> tuple[int, int, int]:
        """Remove unfinished files, files without a row, and rows without their file; how many of each."""
        if self._disk is None:
            return 0, 0, 0
        # In this order: a file is there before its row, and goes after it.
        rows = index.ids()
        sizes = {name.partition(".")[0]: size for name, size in self._disk.sizes().items()}
        gone = [entry for entry, n_bytes in rows.items() if sizes.get(entry) != n_bytes]
        missing = [removed for entry in gone for removed in index.remove(entry)]
        self._remove_files(missing)
        unfinished, orphans = self._disk.remove_left_behind(
            lambda name: index.get(name.partition(".")[0]) is not None
        )
        return unfinished, orphans, len(missing)

    def _use(self, entries: Iterable[str]) -> None:
        with self._lock:
            self._used.update(dict.fromkeys(entries, time.time()))

    def _note_used(self) -> None:
        """Reading writes nothing: when it happened is written with the next change."""
        used, self._used = self._used, {}
        self._index.touch(used)


@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise OSError(f"the index cannot be used: {error}") from error


def _is_better(identity: Identity, block: KVBlock, row: EntryRow) -> bool:
    """Whether a block can be continued from its end more exactly than the same tokens that are stored."""
    try:
        stored = coverage.from_text(row.rows)
    except EntryError:
        return True
    new, old = (
        _WORTH.index(coverage.verdict_of_end(identity, groups, block.p0, block.p1))
        for groups in (coverage.of_block(block), stored)
    )
    return new > old


_WORTH = ("unusable", "inexact", "exact")
_SUFFIXES = {False: ".safetensors", True: ".safetensors.enc"}


def _file_name(row: EntryRow) -> str:
    return row.id + _SUFFIXES[bool(row.key_id)]


def _file_context(identity: bytes, entry: str) -> bytes:
    return b"file" + identity + entry.encode()


def _check_tokens(block: KVBlock, link: Link, match: Match) -> None:
    """What decides about a hit: the tokens in the file are the wanted ones."""
    if (block.p0, block.p1) != (link.p0, link.p1):
        raise EntryError("tokens", f"its file has positions {block.p0} to {block.p1}")
    if not np.array_equal(block.tokens[: link.end - link.p0], match.tokens[link.p0 : link.end]):
        raise EntryError("tokens", "its file has other tokens")


__all__ = ["Entries", "ParentGoneError", "SessionRemovedError", "TooLargeError", "store_root"]
