"""Entries that come from a remote and go there."""

from __future__ import annotations

import io
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, BinaryIO

import numpy as np

from mixedkv.kv.block import KVBlock
from mixedkv.store.entries import Entries
from mixedkv.store.entry_row import EntryError, EntryRow
from mixedkv.store.folder import as_os_error, file_name
from mixedkv.store.identity import Identity
from mixedkv.store.index import Index, ParentGoneError
from mixedkv.store.lookup import BLOCK, Search, block_hashes
from mixedkv.store.results import Match, Tier
from mixedkv.store.sealing import EntryFile


class SharedEntries(Entries):
    """`on_removed` is told the content hashes of what was removed for good, not of what was evicted."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.on_removed: Callable[[list[bytes]], None] = lambda contents: None
        self._adopted: set[str] = set()  # and not read yet

    def read(self, match: Match, begin: int = 0) -> tuple[list[KVBlock], Tier]:
        blocks, tier = super().read(match, begin)
        with self._lock:
            new = {link.entry for link in match.links} & self._adopted
            self._adopted -= new
        return blocks, "remote" if new else tier

    @property
    def on_disk(self) -> bool:
        return self._folder.disk is not None

    def has(self, content: bytes) -> bool:
        with self._lock, as_os_error():
            return self._index.by_content(content) is not None

    def adopt(
        self,
        identity: Identity,
        row: EntryRow,
        parent: bytes | None,
        file: bytes,
        block: KVBlock,
        hashes: list[bytes],
    ) -> None:
        """Take an entry over that another store has made.

        Args:
            row: as the other store has it.
            parent: content hash of the entry it builds on.
            file: the bytes of its file.
            block: what is in the file.
            hashes: of all boundaries up to its end.

        Raises:
            ParentGoneError: what it builds on is not here.
            TooLargeError: it does not fit the budget.
            OSError: it cannot be written.
        """
        with self._lock, as_os_error():
            above = self._index.by_content(parent) if parent is not None else None
        if parent is not None and above is None:
            raise ParentGoneError("the entry that it builds on has been removed")
        up, now = above.id if above else None, time.time()
        size = row.nbytes if self.on_disk else block.nbytes
        row = replace(row, parent=up, nbytes=size, created=now, used=now)
        owner = self._owner(identity)
        self._check_budget(size, up, owner)
        listed = hashes[row.p0 // BLOCK :]

        def insert() -> None:
            try:
                self._insert(row, listed, owner, None, None)
            except sqlite3.IntegrityError:  # who took it over too has given its file the same name
                with self._lock:
                    if self._index.get(row.id) is None:
                        raise

        try:
            # the remote has it too, so that nobody waits for the disk
            self._place(row, [file], {up} if up else set(), insert, durable=False)
        except sqlite3.IntegrityError:
            return  # another thread or process was faster
        except sqlite3.Error as error:
            raise OSError(f"the index cannot be written: {error}") from error
        self.ram.put(row.id, block)
        with self._lock:
            self._adopted.add(row.id)

    def chain(self, identity: Identity, entry: str) -> tuple[list[EntryRow], list[bytes]]:
        """Return an entry behind all that it builds on, and the hashes at its tokens' boundaries; empty if
        one is gone.
        """
        rows: list[EntryRow] = []
        with self._lock, as_os_error(), self._index.snapshot():
            search = Search(self._index, self._cipher, identity, np.empty(0, np.int32))
            tokens = search.tokens_up_to(entry)
            up: str | None = entry
            while tokens is not None and up is not None and (row := self._index.get(up)) is not None:
                rows.append(row)
                up = row.parent
        if tokens is None:
            return [], []
        return rows[::-1], block_hashes(self._cipher, identity, tokens)

    @contextmanager
    def open(self, row: EntryRow) -> Iterator[tuple[BinaryIO, int]]:
        """Open an entry's file; the stream, and how many bytes it has.

        Raises:
            EntryError: it is gone.
        """
        if self._folder.disk is not None:
            with self._folder.disk.open(file_name(row)) as opened:
                yield opened
            return
        block = self.ram.get(row.id)
        if block is None:
            raise EntryError("missing", "it is not in memory any more")
        file = EntryFile(self._cipher, row, block)
        yield io.BytesIO(b"".join(file)), file.nbytes

    def _remove_from(self, remove: Callable[[Index], list[str]]) -> int:
        contents: list[bytes] = []

        def removed(index: Index) -> list[str]:
            known = index.contents()
            gone = remove(index)
            contents.extend(known[entry] for entry in gone if entry in known)
            return gone

        n = super()._remove_from(removed)
        self.on_removed(contents)
        return n
