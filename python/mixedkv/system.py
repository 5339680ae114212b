"""What one system has and another lacks: locks and leases of files, reads at an offset, owners, processors.

Nothing is imported or called that is not there. Where a system has no way of its own, a function does the
same more slowly, or a constant says that it cannot be done, and callers refuse with a remedy.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from typing import IO, Any, BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
try:
    import _winapi
    import msvcrt
except ImportError:
    _winapi = msvcrt = None  # type: ignore[assignment]

HAS_LOCKS = fcntl is not None
"""Whether there are locks of files that end with their process."""
HAS_LEASES = hasattr(fcntl, "F_SETLEASE")
"""Whether a file can be held so that whoever opens it for writing waits: Linux."""
HAS_OWNERS = hasattr(os, "geteuid")
"""Whether a file's mode says who may read it."""
HAS_UNIX_SOCKETS = hasattr(socket, "AF_UNIX")
"""Whether programs of one machine can talk through a path."""


def lock(file: IO[bytes], wait: bool = True) -> None:
    """Lock a file until it is closed or this process ends (`flock`).

    Raises:
        BlockingIOError: another has the lock, and `wait` is False.
    """
    fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def take_lease(fd: int) -> None:
    """Let a program that opens the file for writing wait until `end_lease`, or for lease-break-time (45 s).
    The caller ignores SIGIO before.

    Raises:
        OSError: the file system has no leases, or the file is another user's or open for writing.
    """
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)


def lease_is_broken(fd: int) -> bool:
    """Return whether a program waits for the end of the lease."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_UNLCK)


def end_lease(fd: int) -> None:
    """Let a program that waits for the file go on."""
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def read_at(file: BinaryIO, size: int, offset: int) -> bytes:
    """Read bytes at an offset, and leave the position of the file as it was."""
    if hasattr(os, "pread"):
        return os.pread(file.fileno(), size, offset)
    position = file.tell()
    try:
        file.seek(offset)
        return file.read(size)
    finally:
        file.seek(position)


def has_data(pipe: IO[Any], seconds: float) -> bool:
    """Return whether a pipe has something to read by then, or its end."""
    if _winapi is None:
        return bool(select.select([pipe], [], [], seconds)[0])
    # Windows selects sockets alone, but says how much is in a pipe.
    end = time.monotonic() + seconds
    with contextlib.suppress(OSError):  # it has ended
        handle = msvcrt.get_osfhandle(pipe.fileno())  # type: ignore[attr-defined]
        while not _winapi.PeekNamedPipe(handle, 0)[0]:  # type: ignore[attr-defined]
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)
    return True


def usable_cpus() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_average() -> float:
    """Return how many programs want a processor, over a minute; 0 where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def physical_memory() -> int:
    """Return the bytes of memory of the machine, 0 where the system does not tell."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
