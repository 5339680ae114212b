"""Measures how fast a disk is read in order, past the page cache: what streaming is compared with."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

_CHUNK = 4 << 20
_THREADS = 4


def disk_rate(path: Path, seconds: float = 1.5, rounds: int = 3) -> float:
    """Return the bytes a second of a file, from its start on and again, by four readers that take the next 4
    MiB each; the best of some rounds: others on the machine take away, and never give.

    Where the file system has no O_DIRECT what is measured is the page cache.
    """
    direct = getattr(os, "O_DIRECT", 0)
    try:
        fd = os.open(path, os.O_RDONLY | direct)
    except OSError:
        fd = os.open(path, os.O_RDONLY)
    try:
        return max(_round(fd, seconds) for _ in range(rounds))
    finally:
        os.close(fd)


def _round(fd: int, seconds: float) -> float:
    n_chunks = max(1, os.fstat(fd).st_size // _CHUNK)
    numbers = count()
    began = time.perf_counter()

    def read() -> int:
        n = 0
        with mmap.mmap(-1, _CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as buffer:
            with contextlib.suppress(
                OSError, AttributeError
            ):  # into single pages some disks give half as much
                buffer.madvise(mmap.MADV_HUGEPAGE)
            while time.perf_counter() < began + seconds and (i := next(numbers)) < 4 * n_chunks:
                n += os.preadv(fd, [buffer], i % n_chunks * _CHUNK)
        return n

    with ThreadPoolExecutor(_THREADS) as pool:
        total = sum(future.result() for future in [pool.submit(read) for _ in range(_THREADS)])
    return total / (time.perf_counter() - began)
