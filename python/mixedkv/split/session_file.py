"""Keeps a client's side of a session that its server keeps: the key and the tokens, in one file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from mixedkv.atomic_write import write_atomically
from mixedkv.limits import INT32_MAX
from mixedkv.split.session_key import KEY_BYTES, new_key

_MAX_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class SessionFile:
    """The key and the text of a kept session, in a file of the client.

    Attributes:
        tokens: of the text so far.
        n_kept: the first of them, which the server keeps.
    """

    key: bytes
    tokens: list[int]
    n_kept: int

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> SessionFile:
        """Read the file; make a new key, without tokens, where there is none.

        Raises:
            ValueError: it is no such file.
            PermissionError: others than its owner can read it.
            OSError: it cannot be read.
        """
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_mode & 0o077:
                    raise PermissionError(f"{path} has a key in it that others can read: chmod 600 it")
                data = file.read(_MAX_BYTES)
        except FileNotFoundError:
            return cls(new_key(), [], 0)
        try:
            found = json.loads(data)
            key, tokens, n_kept = bytes.fromhex(found["key"]), found["tokens"], found["n_kept"]
            fits = len(key) == KEY_BYTES and 0 <= n_kept <= len(tokens)
            if not fits or any(type(token) is not int or not 0 <= token <= INT32_MAX for token in tokens):
                raise ValueError("a value is out of range")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is not a session that was kept: {error}") from None
        return cls(key, tokens, n_kept)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file for its owner only, in one piece.

        Raises:
            OSError: it cannot be written.
        """
        text = json.dumps({"key": self.key.hex(), "tokens": self.tokens, "n_kept": self.n_kept})
        write_atomically(Path(path), text, mode=0o600)
