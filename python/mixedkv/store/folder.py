"""The folder of a store: opens and tidies its index and its files, and notices when they are gone."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mixedkv.store.entry_row import EntryRow
from mixedkv.store.identity import FORMAT_VERSION
from mixedkv.store.index import Index
from mixedkv.store.tiers.disk import DiskTier, folder_lock, inode, make_own_folder, open_own

_LOG = logging.getLogger("mixedkv.store")
_INDEX = "index.sqlite3"
_SUFFIXES = {False: ".safetensors", True: ".safetensors.enc"}


def store_root(folder: str | Path) -> Path:
    """Return the folder within `folder` for this version of the format; other versions have their own."""
    return Path(folder) / f"v{FORMAT_VERSION}"


def file_name(row: EntryRow) -> str:
    return row.id + _SUFFIXES[bool(row.key_id)]


@contextmanager
def as_os_error() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise OSError(f"the index cannot be used: {error}") from error


class StoreFolder:
    """`disk` has the files, None in memory only.

    Args:
        root: the folder, None for memory only.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self.disk: DiskTier | None = None
        self._file = (0, 0)
        self._tidied = (0, 0, 0)

    def open(self) -> Index:
        """Make the folder if it is missing, and remove files that were left behind.

        Raises:
            OSError: it cannot be used.
        """
        if self._root is None:
            return Index(None)
        make_own_folder(self._root.parent)
        make_own_folder(self._root)
        self.disk = DiskTier(self._root / "entries")
        path = self._root / _INDEX
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
            self._file = inode(path)
        return index

    def is_there(self) -> bool:
        """Return whether the index that was opened is still the one in the folder."""
        return self._root is None or self._file == inode(self._root / _INDEX)

    def tidy(self, index: Index) -> tuple[int, int, int]:
        """Remove unfinished files, files without a row, and rows without a file; return how many of each,
        including those that opening has removed.
        """
        now, before, self._tidied = self._tidy(index), self._tidied, (0, 0, 0)
        return now[0] + before[0], now[1] + before[1], now[2] + before[2]

    def remove(self, entry: str) -> None:
        """Remove the file of an entry."""
        if self.disk is not None:
            for suffix in _SUFFIXES.values():
                self.disk.remove(f"{entry}{suffix}")

    def _open_index(self, path: Path) -> Index:
        open_own(path).close()  # its log and its index get their mode from it
        index = Index(path)
        try:
            self._tidied = self._tidy(index)
        except BaseException:
            index.close()
            raise
        return index

    def _tidy(self, index: Index) -> tuple[int, int, int]:
        if self.disk is None:
            return 0, 0, 0
        # In this order, since a file is written before its row and removed after it.
        rows = index.ids()
        sizes = {name.partition(".")[0]: size for name, size in self.disk.sizes().items()}
        gone = [entry for entry, n_bytes in rows.items() if sizes.get(entry) != n_bytes]
        missing = [removed for entry in gone for removed in index.remove(entry)]
        for entry in missing:
            self.remove(entry)
        unfinished, orphans = self.disk.remove_left_behind(
            lambda name: index.get(name.partition(".")[0]) is not None
        )
        return unfinished, orphans, len(missing)
