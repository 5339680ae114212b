"""The files of a store. A file with its final name is whole, since it was flushed before it got the name.

The writer of a file holds a lock on it (`flock`) until the index has it. A lock ends with its process,
however that ends. So a file that is not locked and not in the index was left behind.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import sqlite3
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from mixedkv import system
from mixedkv.backoff import Backoff
from mixedkv.log_once import LogOnce
from mixedkv.store.entry_row import EntryError

_TEMPORARY = ".tmp"
_NAME = re.compile(r"[0-9a-f]{32}\.(safetensors(\.enc)?|tmp)")
_MAX_FILE = 1 << 40


class DiskTier:
    """A folder with one file per entry, named by its id.

    Raises:
        OSError: the folder cannot be made, or this system has no locks that end with their process.
    """

    def __init__(self, folder: Path) -> None:
        if not system.HAS_LOCKS:
            raise OSError(
                errno.ENOTSUP,
                "a store in a folder needs POSIX file locks, which this system lacks: keep KV in memory, "
                "KVStore(None)",
                str(folder),
            )
        self.folder = folder
        make_own_folder(folder)

    def path(self, name: str) -> Path:
        return self.folder / name

    @contextmanager
    def publish(
        self, name: str, buffers: Iterable[bytes | memoryview], durable: bool = True
    ) -> Iterator[None]:
        """Write a file and give it its name; within the block the caller puts it into the index. A file that
        is not `durable` may be damaged after a power cut.

        If the block raises, the file is removed again.
        """
        temporary, file = self._create_locked()
        path = temporary
        try:
            with file:
                for buffer in buffers:
                    file.write(buffer)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
                os.rename(temporary, self.path(name))
                path = self.path(name)
                if durable:
                    self._sync_folder()
                yield
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    @contextmanager
    def open(self, name: str) -> Iterator[tuple[BinaryIO, int]]:
        """Open a file and return the stream and its size.

        Raises:
            EntryError: the file is gone or cannot be read, also while the block reads.
        """
        try:
            # Who can write to the folder may have put something else there: a pipe must not be waited for.
            fd = os.open(self.path(name), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(fd, "rb", buffering=0) as file:
                info = os.fstat(fd)
                if not stat.S_ISREG(info.st_mode):
                    raise EntryError("damaged", "its file is not a regular file")
                if info.st_uid != os.geteuid():
                    raise EntryError("damaged", "its file belongs to another user")
                yield file, info.st_size
        except FileNotFoundError:
            raise EntryError("missing", "its file is gone") from None
        except OSError as error:
            raise EntryError("damaged", f"its file cannot be read: {error.strerror}") from error

    def remove(self, name: str) -> None:
        """Remove a file. It may be gone already; files that are not of this store are left alone."""
        if _NAME.fullmatch(name):
            with suppress(FileNotFoundError, IsADirectoryError):
                self.path(name).unlink()

    def sizes(self) -> dict[str, int]:
        """Return the size of every file that has its final name."""
        found = {}
        for item in os.scandir(self.folder):
            with suppress(FileNotFoundError):
                if not item.name.endswith(_TEMPORARY) and item.is_file(follow_symlinks=False):
                    found[item.name] = item.stat(follow_symlinks=False).st_size
        return found

    def remove_left_behind(self, is_known: Callable[[str], bool]) -> tuple[int, int]:
        """Remove files that the index does not know and no process is writing; return how many unfinished and
        how many finished ones.
        """
        unfinished = finished = 0
        for item in list(os.scandir(self.folder)):
            if not _NAME.fullmatch(item.name) or not item.is_file(follow_symlinks=False):
                continue  # not a file of this store
            if item.name.endswith(_TEMPORARY):
                unfinished += _unlink_unlocked(Path(item.path), lambda: False)
            elif not is_known(item.name):
                # With the lock held, a file that is not in the index now will never be.
                finished += _unlink_unlocked(Path(item.path), partial(is_known, item.name))
        return unfinished, finished

    def _create_locked(self) -> tuple[Path, IO[bytes]]:
        self.folder.mkdir(mode=0o700, exist_ok=True)  # it was removed with the folder's contents
        while True:
            path = self.folder / f"{secrets.token_hex(16)}{_TEMPORARY}"
            file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "wb")
            try:
                system.lock(file, wait=False)
                if path.exists():
                    return path, file
            except BlockingIOError:  # another process has removed it
                pass
            except BaseException:
                file.close()
                path.unlink(missing_ok=True)
                raise
            file.close()

    def _sync_folder(self) -> None:
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextmanager
def folder_lock(path: Path) -> Iterator[None]:
    """Hold the lock of the one process that opens and tidies a store."""
    with open_own(path) as file:
        system.lock(file)
        yield


def open_own(path: Path) -> IO[bytes]:
    """Open a file of the store for its owner alone, creating it if it is missing; contents are kept.

    Raises:
        OSError: it is a link, is another user's, or cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        file = os.fdopen(os.open(path, flags, 0o600), "r+b")
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "it is a link, which no file of a store is", str(path)) from None
        raise
    try:
        info = os.fstat(file.fileno())
        if info.st_uid != os.geteuid() or not stat.S_ISREG(info.st_mode):
            raise PermissionError(
                f"{path} belongs to another user, or is not a file: remove it, or use a folder of your own"
            )
        os.fchmod(file.fileno(), 0o600)
    except BaseException:
        file.close()
        raise
    return file


def make_own_folder(path: Path) -> None:
    """Make a folder that only its owner can open, since texts can be reconstructed from its contents.

    Raises:
        PermissionError: it is another user's, or others may write to it.
    """
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a folder is needed, this is a file", str(path))
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_folder(path)


def check_folder(path: Path, owners: Iterable[int] = ()) -> None:
    """Refuse a folder in which others can replace files.

    Args:
        owners: users whose folder it may be besides this process's.

    Raises:
        PermissionError: it is another user's, or others may write to it.
    """
    info = path.stat()
    if info.st_uid not in (os.geteuid(), *owners):
        raise PermissionError(f"{path} belongs to another user: use a folder of your own")
    if info.st_mode & 0o022:
        raise PermissionError(
            f"{path} can be written by others ({stat.S_IMODE(info.st_mode):o}): chmod 700 it"
        )


def inode(path: Path) -> tuple[int, int]:
    """Return device and inode of a file, zeros if there is none."""
    try:
        info = path.stat()
    except FileNotFoundError:
        return 0, 0
    return info.st_dev, info.st_ino


def is_full(error: Exception) -> bool:
    """Return whether a write failed because there is no room."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "full" in str(error)  # sqlite3's; its errors have had a code since Python 3.11 only


def read_all(file: BinaryIO, size: int) -> npt.NDArray[np.uint8]:
    """Return a whole file, uint8 [size].

    It is read and not mapped: a mapped file that another program cuts short kills this process, and one that
    changes after its checks would not have been checked.
    """
    if size > _MAX_FILE:
        raise EntryError("damaged", f"its file has {size} bytes, more than any entry")
    data = np.empty(size, np.uint8)
    view = memoryview(data)
    done = 0
    while done < size:
        n: Any = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not n:
            raise EntryError("damaged", "its file is cut off")
        done += n
    return data


def _unlink_unlocked(path: Path, is_known: Callable[[], bool]) -> int:
    """Remove a file unless a process holds it or the index knows it; return how many were removed."""
    try:
        with open(path, "rb") as file:
            system.lock(file, wait=False)
            if is_known():
                return 0
            path.unlink()
            return 1
    except (BlockingIOError, FileNotFoundError, IsADirectoryError):
        return 0


_LOG = logging.getLogger("mixedkv.store")
_FIRST_SECONDS, _LONGEST_SECONDS = 1.0, 300.0


class FullDisk:
    """Waits twice as long after each failure. Logs one line when the disk is full, and one when it has room
    again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._once = LogOnce(_LOG)
        self._backoff = Backoff(_FIRST_SECONDS, _LONGEST_SECONDS, clock)

    def store(self, publish: Callable[[], None], make_room: Callable[[int], bool], size: int) -> None:
        """Publish some bytes. If there is no room, evict as much, then twice and four times as much, then
        wait, so that a disk filled by others does not cost all entries.

        Args:
            make_room: evicts entries; returns False if there are none to evict.

        Raises:
            OSError, sqlite3.OperationalError: it cannot be written.
        """
        self.check()
        for more in (size, 2 * size, 4 * size, 0):
            try:
                publish()
            except (OSError, sqlite3.OperationalError) as error:
                if not is_full(error):
                    raise
                if not (more and make_room(more)):
                    self.failed()
                    raise
            else:
                self.succeeded()
                return

    def check(self) -> None:
        """Refuse to write while the disk is known to be full.

        Raises:
            OSError: ENOSPC, the next try is not due yet.
        """
        if left := self._backoff.left:
            raise OSError(errno.ENOSPC, f"the disk is full: nothing is stored for {left:.0f} seconds")

    def warn_once(self) -> None:
        """Log that the disk is full, once until it has room again."""
        text = "the disk is full before the store is: entries are evicted for new ones"
        self._once.warning(text, key="full")

    def failed(self) -> None:
        """Note that there was no room even after evictions, and wait longer each time."""
        self.warn_once()
        self._backoff.failed()

    def succeeded(self) -> None:
        if self._backoff.seconds:
            _LOG.info("the disk has room again: entries are stored")
            self._once.forget("full")
        self._backoff.succeeded()
