"""The SHA-256 of a file that was downloaded."""

from __future__ import annotations

import hashlib
from pathlib import Path

_PIECE = 1 << 20


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal, reading a piece at a time.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
