"""Files that appear complete: readers see the old file or the new one, never a part."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[Path]:
    """Give the path of a temporary file; after the block it is on the disk and has the name `path`.

    It lies in the same folder. If the block raises, it is removed and `path` stays as it was. `mode` are the
    permissions of the complete file; until then only its owner can open it.

    Raises:
        OSError: the file cannot be written.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".", suffix=".part")
    os.close(handle)
    part = Path(name)
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.chmod(mode)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a text file, in UTF-8, all of it or nothing.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path, mode) as part:
        part.write_text(text, encoding="utf-8")
