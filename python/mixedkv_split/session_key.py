"""The key of a session that is kept on the server, and that only the client holds on to, in a file with the
tokens: wrapped on its way with HPKE (RFC 9180, base mode), in the server's memory while it is in use.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from mixedkv import system
from mixedkv.atomic_write import write_atomically
from mixedkv.limits import INT32_MAX
from mixedkv_split import wire

KEY_BYTES = 32
_SUITE = hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)
_WRAPPED_BYTES = KEY_BYTES + 32 + 16  # what is encapsulated, and the tag
_INFO = b"mixedkv.split.v1 session key"


def new_key() -> bytes:
    """Make a random key. Without it, nobody can open the session that was kept with it."""
    return secrets.token_bytes(KEY_BYTES)


def session_name(key: bytes) -> bytes:
    """Return the name by which the server knows a key's session.

    Raises:
        ValueError: it is no key.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"key: it has {KEY_BYTES} bytes, not {len(key)}")
    return hashlib.blake2b(key, digest_size=wire.SESSION_BYTES, person=b"mixedkv session").digest()


def wrap(key: bytes, public_key: bytes, session: bytes) -> bytes:
    """Wrap the key for the server with this public key, and for this session only."""
    return _SUITE.encrypt(key, X25519PublicKey.from_public_bytes(public_key), info=_INFO + session)


class Unwrapper:
    """Opens keys that were wrapped for this process: its own private key is never written down.

    Attributes:
        public_key: 32 bytes, to wrap for.
    """

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public_key = self._private.public_key().public_bytes_raw()

    @contextmanager
    def open(self, wrapped: bytes, session: bytes) -> Iterator[bytes]:
        """Open the key for a block; its bytes are zero afterwards.

        Raises:
            ValueError: it was not wrapped for this process and this session.
        """
        if len(wrapped) != _WRAPPED_BYTES:
            raise ValueError(f"wrapped_key: it has {_WRAPPED_BYTES} bytes, not {len(wrapped)}")
        try:
            key = _SUITE.decrypt(wrapped, self._private, info=_INFO + session)
        except InvalidTag:
            raise ValueError(
                "wrapped_key: it was not wrapped for this server and session: Describe has the public key"
            ) from None
        try:
            yield key
        finally:
            _wipe(key)


def _wipe(data: bytes) -> None:
    """Wipe an object that nobody else has: CPython keeps its bytes behind the header, and a zero after
    them.
    """
    ctypes.memset(id(data) + bytes.__basicsize__ - 1, 0, len(data))


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
                if not system.HAS_OWNERS:
                    raise PermissionError(f"{path}: this system does not tell who may read a key in a file")
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
        """Write the file for its owner only, all of it or nothing.

        Raises:
            OSError: it cannot be written.
        """
        text = json.dumps({"key": self.key.hex(), "tokens": self.tokens, "n_kept": self.n_kept})
        write_atomically(Path(path), text, mode=0o600)
