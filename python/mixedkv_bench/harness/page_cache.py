"""Files that the system no longer has in memory, so that reading them is reading the disk."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np


def drop_cached(files: Iterable[Path]) -> bool:
    """Ask the system to forget files that are on the disk; whether it did (not on a RAM disk)."""
    if not hasattr(os, "posix_fadvise"):
        return False
    paths = list(files)
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return all(resident_share(path) < 0.05 for path in paths)


def resident_share(path: Path) -> float:
    """Share of a file's pages that are in memory (mincore). 1 where that cannot be told."""
    mincore = getattr(ctypes.CDLL(None), "mincore", None)
    size = path.stat().st_size
    if mincore is None or size == 0:
        return float(mincore is None)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(mapped, np.uint8)
        address, where = ctypes.c_void_p(view.ctypes.data), ctypes.c_void_p(pages.ctypes.data)
        failed = mincore(address, ctypes.c_size_t(size), where)
        del view  # the map cannot be closed under it
    return 1.0 if failed else float((pages & 1).mean())
