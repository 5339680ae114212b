"""The file of an entry while its pieces arrive."""

from __future__ import annotations

import io
from collections.abc import Iterator

from mixedkv.store.entry_error import EntryError


class Download(io.RawIOBase):
    """Reads as a file does.

    Args:
        pieces: of the remote, as they come; None for one that is gone.
        n_pieces: how many of them are the file's.
        keep: whether `pieces` shall have them when they were read.
    """

    def __init__(self, pieces: Iterator[memoryview | None], n_pieces: int, *, keep: bool) -> None:
        self._coming, self._left, self._keep = pieces, n_pieces, keep
        self._rest = memoryview(b"")
        self.pieces: list[bytes] = []

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read as many bytes as there is room for; fewer only at the end.

        Raises:
            EntryError: a piece is missing.
            RemoteError: it does not come in time.
        """
        view, done = memoryview(buffer).cast("B"), 0
        while done < len(view) and (len(self._rest) or self._next()):
            n = min(len(self._rest), len(view) - done)
            view[done : done + n] = self._rest[:n]
            self._rest, done = self._rest[n:], done + n
        return done

    def _next(self) -> bool:
        if not self._left:
            return False
        self._left -= 1
        piece = next(self._coming)
        if piece is None:
            raise EntryError("missing", "a piece of it is gone from the remote, or is not what was written")
        if self._keep:
            self.pieces.append(bytes(piece))
        self._rest = piece
        return True
