"""Moves weights that are read from a mapped file into pages of 2 MB, where the file lies in small ones: a
core reads them up to 1.3 times as fast then. See docs/decisions/092-large-pages.md.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from mixedkv.native.memory import memory_room

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PAGE = 2 << 20
_LEAST = 8 * _PAGE  # below, it is all over too soon
_CHUNK = 32 * _PAGE  # as much is held twice at once
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2


def move_to_large_pages(weights: Iterable[tuple[int, int]]) -> int:
    """Move mapped weights, each an address and a number of bytes, and return the number of bytes moved.

    Nothing is moved where most of it lies in large pages already, where Linux makes none, or where twice as
    much memory is not left. Others may read meanwhile: each chunk is exchanged for its copy at once.
    """
    if not _SETTING.exists() or "[never]" in _SETTING.read_text():
        return 0
    areas = [area for area in _areas(weights) if area[1] > area[0]]
    n_bytes, room = sum(end - begin for begin, end in areas), memory_room()
    if n_bytes < _LEAST or room is None or room < 2 * n_bytes or _mostly_large(areas):
        return 0
    return sum(_move(at, min(at + _CHUNK, end)) for begin, end in areas for at in range(begin, end, _CHUNK))


def _areas(weights: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the whole pages of 2 MB that hold weights, which lie close together."""
    begin = end = 0
    for address, size in sorted(weights):
        if address > end + _PAGE:
            yield _inner(begin, end)
            begin = address
        end = max(end, address + size)
    yield _inner(begin, end)


def _inner(begin: int, end: int) -> tuple[int, int]:
    return -(-begin // _PAGE) * _PAGE, end // _PAGE * _PAGE


def _mostly_large(areas: list[tuple[int, int]]) -> bool:
    """True if half of what is resident of the mappings that hold the areas lies in large pages."""
    resident = large = 0
    smaps = Path("/proc/self/smaps").read_text(errors="replace")
    for text in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.MULTILINE)[1:]:
        begin, end = (int(address, 16) for address in text.split(maxsplit=1)[0].split("-"))
        if any(begin < area[1] and area[0] < end for area in areas):
            sizes = dict(re.findall(r"^(\w+): +(\d+) kB", text, flags=re.MULTILINE))
            resident += int(sizes["Rss"])
            large += int(sizes.get("FilePmdMapped", 0)) + int(sizes["AnonHugePages"])
    return 2 * large >= resident


def _move(begin: int, end: int) -> int:
    libc, n = _libc(), end - begin
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    copy = libc.mmap(None, n + _PAGE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if copy == ctypes.c_void_p(-1).value:
        return 0
    aligned = -(-copy // _PAGE) * _PAGE
    libc.madvise(aligned, n, mmap.MADV_HUGEPAGE)
    libc.memcpy(aligned, begin, n)
    libc.mprotect(aligned, n, mmap.PROT_READ)
    moved = libc.mremap(aligned, n, n, _MREMAP_MAYMOVE | _MREMAP_FIXED, begin) == begin
    for start, stop in ((copy, aligned if moved else aligned + n), (aligned + n, copy + n + _PAGE)):
        if stop > start:
            libc.munmap(start, stop - start)
    return n if moved else 0


def _libc() -> ctypes.CDLL:
    libc, address, size = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.argtypes = address, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    libc.mremap.argtypes = address, size, size, ctypes.c_int, address
    libc.mmap.restype = libc.mremap.restype = address
    libc.memcpy.argtypes = address, address, size
    for function in (libc.madvise, libc.mprotect):
        function.argtypes = address, size, ctypes.c_int
    libc.munmap.argtypes = address, size
    return libc
