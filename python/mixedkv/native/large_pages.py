"""Moves a mapped model into pages of 2 MB where its file lies in small ones: a core reads weights up to 1.3
times as fast then. See docs/decisions/092-large-pages.md.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mixedkv.native.memory import memory_room

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PAGE = 2 << 20
_LEAST = 8 * _PAGE  # below, it is all over too soon
_PIECE = 32 * _PAGE  # as much is held twice at once
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2


@dataclass(frozen=True, slots=True)
class _Mapping:
    begin: int
    end: int
    resident: int
    large: int

    @property
    def small(self) -> int:
        return self.resident - self.large


def move_to_large_pages(path: Path) -> int:
    """Move what this process has mapped of the file, and return the number of bytes.

    Nothing is moved where most of it lies in large pages already, where Linux makes none, or where twice as
    much memory is not left. Others may read meanwhile: each piece is exchanged for its copy at once.
    """
    if os.path.getsize(path) < _LEAST or not _SETTING.exists() or "[never]" in _SETTING.read_text():
        return 0
    mappings = list(_mappings(os.path.realpath(path)))
    n_small, room = sum(each.small for each in mappings), memory_room()
    if 2 * n_small <= sum(each.resident for each in mappings) or room is None or room < 2 * n_small:
        return 0
    return sum(_move(begin, end) for each in mappings for begin, end in _pieces(each))


def _mappings(path: str) -> Iterator[_Mapping]:
    smaps = Path("/proc/self/smaps").read_text(errors="replace")
    for text in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.MULTILINE)[1:]:
        first, *rest = text.splitlines()
        if [*first.split(maxsplit=5), ""][5] != path:
            continue
        begin, end = (int(address, 16) for address in first.split()[0].split("-"))
        sizes = {
            name: int(value.split()[0]) << 10
            for name, value in (line.split(":") for line in rest if " kB" in line)
        }
        yield _Mapping(begin, end, sizes["Rss"], sizes.get("FilePmdMapped", 0))


def _pieces(mapping: _Mapping) -> Iterator[tuple[int, int]]:
    begin, end = -(-mapping.begin // _PAGE) * _PAGE, mapping.end // _PAGE * _PAGE
    for at in range(begin, end, _PIECE):
        yield at, min(at + _PIECE, end)


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
