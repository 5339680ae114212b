"""Identifies a GGUF file without reading all of it.

Hashed are the size, the header (all metadata and the table of tensors) and 4 KiB of every tensor's data, at
another place in each. Retraining, merging and requantising change every tensor they touch nearly everywhere,
so they show; a few bytes patched in one tensor may not: the full hash is for who expects that. Files up to
16 MiB are read whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from mixedkv import system
from mixedkv.model.gguf_file import ModelFile, Reader, other_parts, pad

_SAMPLE = 1 << 12
_WHOLE = 1 << 24
_CHUNK = 1 << 20
_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, spread evenly


@dataclass(frozen=True, slots=True)
class FileKey:
    """A file as it is now: what is computed of it holds as long as this does."""

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> FileKey:
        real = os.path.realpath(path)
        info = os.stat(real)
        return cls(real, info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)


def model_header(path: str | os.PathLike[str]) -> ModelFile:
    """Return the header of a model's first file, read once as long as the file stays as it is."""
    return _header(FileKey.of(path))


def fingerprint(path: str | os.PathLike[str], *, full_hash: bool = False) -> str:
    """Return 64 hex digits for the content of a GGUF file, for a split model of all its parts; names do not
    matter.

    Args:
        full_hash: read everything.

    Raises:
        InvalidModelFileError: a part is no GGUF file, or is not there.
        OSError: a file cannot be read.
    """
    return _combined(tuple(_of_file(part, full_hash) for part in model_parts(path)))


def model_parts(path: str | os.PathLike[str]) -> tuple[FileKey, ...]:
    """Return all files of a model."""
    key = FileKey.of(path)
    return key, *(FileKey.of(part) for part in other_parts(_header(key)))


@lru_cache(maxsize=64)
def _header(key: FileKey) -> ModelFile:
    with open(key.path, "rb", buffering=1 << 18) as file:
        return Reader(Path(key.path), file).read()


@lru_cache(maxsize=256)
def _of_file(key: FileKey, full_hash: bool) -> str:
    digest = hashlib.sha256(f"{'full' if full_hash else 'sampled'} {key.size}\n".encode())
    with open(key.path, "rb", buffering=1 << 18) as file:
        whole = full_hash or key.size <= _WHOLE
        for offset, size in [(0, key.size)] if whole else _samples(Path(key.path), file):
            for begin in range(offset, offset + size, _CHUNK):
                digest.update(system.read_at(file, min(_CHUNK, offset + size - begin), begin))
    return digest.hexdigest()


def _combined(parts: tuple[str, ...]) -> str:
    return parts[0] if len(parts) == 1 else hashlib.sha256(" ".join(parts).encode()).hexdigest()


def _samples(path: Path, file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yield the offset and size of what is hashed."""
    reader = Reader(path, file)
    tensors = reader.read().tensors
    yield 0, file.tell()
    begin = pad(file.tell(), reader.alignment)
    for i, end in enumerate(sorted(tensor.start + tensor.n_bytes for tensor in tensors)):
        size = min(_SAMPLE, end - begin)
        yield begin + int((end - begin - size) * (i * _GOLDEN % 1)), size
        begin = end


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal, reading a chunk at a time.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
