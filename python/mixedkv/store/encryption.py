"""Encryption at rest: AES-256-GCM in chunks, a key for every entry, wrapped by one master key.

docs/formats.md has the bytes, docs/store.md what is protected and what is not.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt

from mixedkv import system
from mixedkv.store.entry_row import EntryError

KeySource = Callable[[], bytes]

CHUNK = 1 << 20
VERSION = 1
PLAIN_ENTRIES = (
    "%s: entries that were stored there before the store had a key lie in plain text and are not used: "
    "remove them with `mixedkv cache rm`"
)
HEADER = struct.Struct("<8sIIQ")  # magic, version, chunk size, bytes of the plain file
_MAGIC = b"MKVCRYPT"
_KEY_BYTES = 32
_NONCE_BYTES = 12
_TAG_BYTES = 16
_WRAPPED_BYTES = _NONCE_BYTES + _KEY_BYTES + _TAG_BYTES
_HASHING = b"hashing"
_MAX_CHUNKS = 1 << 32
_NAME_NONCE = b"\xff" * _NONCE_BYTES  # of an entry's tokens; a file's chunks never get there


# --- where the master key comes from ---


def key_from_environment(name: str = "MIXEDKV_KEY") -> KeySource:
    """Read a key from an environment variable, as 64 hex digits or base64 of 32 bytes."""

    def read() -> bytes:
        text = os.environ.get(name, "")
        if not text:
            raise ValueError(f"master key: the environment variable {name} is not set")
        return _parse_key(text.encode(), f"environment variable {name}")

    return read


def key_from_file(path: str | os.PathLike[str]) -> KeySource:
    """Read a key from a file of 32 bytes, or of 64 hex digits or base64 of them.

    The file must be this user's, and nobody else may read it (mode 0600 or 0400): PermissionError otherwise.
    """

    def read() -> bytes:
        if not system.HAS_OWNERS:
            raise PermissionError(
                f"master key: this system does not tell who may read {path}. Give --key env:NAME, or in "
                "Python key_from_environment('NAME')"
            )
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise ValueError(f"master key: {path} is not a regular file")
            if info.st_uid != os.geteuid():
                raise PermissionError(f"master key: {path} belongs to another user")
            if info.st_mode & 0o177:
                mode = stat.S_IMODE(info.st_mode)
                raise PermissionError(f"master key: {path} has mode {mode:04o}; chmod 600 it")
            return _parse_key(file.read(256), str(path))

    return read


def parse_key_source(text: str) -> KeySource:
    """Parse a key source as written on a command line: "env:NAME" or "file:PATH"."""
    kind, colon, rest = text.partition(":")
    if not colon or not rest or kind not in ("env", "file"):
        raise ValueError(f"key={text!r}: use env:NAME or file:PATH")
    return key_from_environment(rest) if kind == "env" else key_from_file(Path(rest))


def _parse_key(data: bytes, where: str) -> bytes:
    if len(data) == _KEY_BYTES and not re.fullmatch(rb"[\s -~]*", data):  # text has too few random bits
        return data
    text = data.strip()
    if re.fullmatch(rb"[0-9a-fA-F]{64}", text):
        return bytes.fromhex(text.decode())
    try:
        key = base64.b64decode(text, validate=True)
    except binascii.Error:
        key = b""
    return _check_key(key, where)


def _check_key(key: object, where: str) -> bytes:
    if not isinstance(key, bytes) or len(key) != _KEY_BYTES:
        raise ValueError(f"master key: {where} does not hold {_KEY_BYTES} bytes (raw, hex or base64)")
    return key


# --- what a store does with the key ---


class PlainCipher:
    """The cipher of a store without a key: hashes are SHA-256, and nothing is encrypted."""

    key_id = ""

    def digest(self, data: bytes) -> bytes:
        return hashlib.sha256(data).digest()

    def name(self, kind: bytes, text: str) -> bytes:
        """Return what stands in the index for a name: of a tenant, a session or an owner."""
        return self.digest(kind + text.encode())[:16]

    def new_key(self, context: bytes) -> tuple[Any, bytes]:
        """Make a data key and return it with its wrapped form; `context` says what it is for."""
        return None, b""

    def open_key(self, wrapped: bytes, context: bytes) -> Any:
        return None

    def seal(self, key: Any, data: bytes, context: bytes) -> bytes:
        """Encrypt the small text of an entry that is kept in the index."""
        return data

    def unseal(self, key: Any, data: bytes, context: bytes) -> bytes:
        return data

    def seal_alone(self, data: bytes, context: bytes) -> bytes:
        """Encrypt a text that is kept outside the store, preceded by its data key."""
        return data

    def unseal_alone(self, data: bytes, context: bytes) -> bytes:
        """Decrypt a text from `seal_alone`.

        Raises:
            EntryError: it was encrypted with another master key, or was changed.
        """
        return data


class KeyCipher(PlainCipher):
    """The cipher of a store with a master key: hashes are keyed, and each entry has a data key, wrapped in
    the index.
    """

    def __init__(self, source: KeySource) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        master = _check_key(source(), "its source")
        self._gcm, self._invalid = AESGCM, InvalidTag
        # Three keys for three purposes, and a name that tells master keys apart without revealing them.
        self._wrapping = AESGCM(_derive(master, b"wrap"))
        self._hashing = _derive(master, b"hash")
        self.key_id = _derive(master, b"name")[:8].hex()

    def digest(self, data: bytes) -> bytes:
        return hmac.digest(self._hashing, data, "sha256")

    def new_key(self, context: bytes) -> tuple[Any, bytes]:
        key = os.urandom(_KEY_BYTES)
        return self._gcm(key), self._wrap(key, context)

    def open_key(self, wrapped: bytes, context: bytes) -> Any:
        return self._gcm(self._unwrap(wrapped, context))

    def rewrap(self, other: KeyCipher, wrapped: bytes, context: bytes) -> bytes:
        """Wrap a data key of this master key with another master key."""
        return other._wrap(self._unwrap(wrapped, context), context)

    def wrap_hashing_key(self) -> bytes:
        """Return the wrapped hashing key, for a store that gets another master key."""
        return self._wrap(self._hashing, _HASHING)

    def rewrap_hashing_key(self, other: KeyCipher) -> bytes:
        return other._wrap(self._hashing, _HASHING)

    def unwrap_hashing_key(self, wrapped: bytes) -> None:
        """Use the hashing key of the store's former master key."""
        self._hashing = self._unwrap(wrapped, _HASHING)

    def _wrap(self, key: bytes, context: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + bytes(self._wrapping.encrypt(nonce, key, context))

    def _unwrap(self, wrapped: bytes, context: bytes) -> bytes:
        if len(wrapped) != _WRAPPED_BYTES:
            raise EntryError("key", "its data key has been destroyed")
        nonce, sealed = wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:]
        try:
            return bytes(self._wrapping.decrypt(nonce, sealed, context))
        except self._invalid:
            raise EntryError("key", "its data key is not of this master key, or is damaged") from None

    def seal(self, key: Any, data: bytes, context: bytes) -> bytes:
        return bytes(key.encrypt(_NAME_NONCE, data, context))

    def unseal(self, key: Any, data: bytes, context: bytes) -> bytes:
        try:
            return bytes(key.decrypt(_NAME_NONCE, data, context))
        except self._invalid:
            raise EntryError("damaged", "its encrypted data was changed after it was written") from None

    def seal_alone(self, data: bytes, context: bytes) -> bytes:
        key, wrapped = self.new_key(context)
        return wrapped + self.seal(key, data, context)

    def unseal_alone(self, data: bytes, context: bytes) -> bytes:
        key = self.open_key(data[:_WRAPPED_BYTES], context)
        return self.unseal(key, data[_WRAPPED_BYTES:], context)


Cipher = PlainCipher | KeyCipher


def _derive(master: bytes, purpose: bytes) -> bytes:
    """Derive a key by one block of HKDF-Expand (RFC 5869); the master key is random already, so nothing is
    extracted.
    """
    return hmac.digest(master, b"mixedkv store v1 " + purpose + b"\x01", "sha256")


def check_key_id(stored: set[str], given: str, folder: object) -> None:
    """Refuse to open an encrypted store without its key: it would put plain text beside what is encrypted.

    Raises:
        ValueError: the store is encrypted with another key than the given one.
    """
    encrypted = stored - {""}
    if encrypted and given not in encrypted:
        what = "with another key: give that one" if given else "with a key: give it"
        raise ValueError(f"{folder}: what is stored there is encrypted {what}, or use another folder")


# --- files ---


def encrypt(key: Any, buffers: Sequence[memoryview], context: bytes) -> Iterator[bytes]:
    """Encrypt a file, given as buffers. `key` is used for this file only, which `context` names."""
    size = sum(len(buffer) for buffer in buffers)
    header = HEADER.pack(_MAGIC, VERSION, CHUNK, size)
    yield header
    n_chunks = _n_chunks(size)
    for i, chunk in enumerate(_rechunk(buffers)):
        yield key.encrypt(_nonce(i), chunk, _associated(header, context, i, i == n_chunks - 1))


def decrypt(key: Any, file: BinaryIO, size: int, context: bytes) -> npt.NDArray[np.uint8]:
    """Decrypt a file to uint8; `size` is that of the encrypted file.

    Raises:
        EntryError: a byte was changed, chunks are out of order, or some are missing.
    """
    from cryptography.exceptions import InvalidTag

    header = file.read(HEADER.size)
    plain_size = _check_header(header, size)
    plain = np.empty(plain_size, np.uint8)
    buffer, target = memoryview(bytearray(CHUNK + _TAG_BYTES)), memoryview(plain)
    n_chunks = _n_chunks(plain_size)
    for i in range(n_chunks):
        begin = i * CHUNK
        end = min(begin + CHUNK, plain_size)
        chunk = buffer[: end - begin + _TAG_BYTES]
        if file.readinto(chunk) != len(chunk):  # type: ignore[attr-defined]
            _damaged("it is cut off")
        associated = _associated(header, context, i, i == n_chunks - 1)
        try:
            key.decrypt_into(_nonce(i), chunk, associated, target[begin:end])
        except InvalidTag:
            _damaged(f"chunk {i} of {n_chunks} is not what was written")
    if file.read(1):
        _damaged("bytes follow after its end")
    return plain


def encrypted_size(size: int) -> int:
    """Return the size of a plain file after encryption."""
    return HEADER.size + size + _n_chunks(size) * _TAG_BYTES


def _check_header(header: bytes, size: int) -> int:
    """Return the size of the plain file, checked against the encrypted one before memory is allocated."""
    if len(header) < HEADER.size:
        _damaged("it is cut off")
    magic, version, chunk, plain_size = HEADER.unpack(header)
    if magic != _MAGIC:
        _damaged("it is not an encrypted entry")
    if version != VERSION:
        raise EntryError("version", f"its encryption has version {version}, not {VERSION}")
    if chunk != CHUNK or _n_chunks(plain_size) > _MAX_CHUNKS or size != encrypted_size(plain_size):
        _damaged(f"its header claims {plain_size} bytes, the file has {size}")
    return int(plain_size)


def _n_chunks(size: int) -> int:
    return max(1, -(-size // CHUNK))


def _nonce(i: int) -> bytes:
    return i.to_bytes(_NONCE_BYTES, "little")


def _associated(header: bytes, context: bytes, i: int, last: bool) -> bytes:
    return header + struct.pack("<QB", i, last) + context


def _rechunk(buffers: Sequence[memoryview]) -> Iterator[bytes | memoryview]:
    """Cut bytes into chunks, the last one shorter; without a copy where a chunk lies in one buffer."""
    rest = bytearray()
    sent = False
    for buffer in buffers:
        at = 0
        while at < len(buffer):
            take = min(CHUNK - len(rest), len(buffer) - at)
            part = buffer[at : at + take]
            at += take
            if take == CHUNK:
                yield part
                sent = True
                continue
            rest += part
            if len(rest) == CHUNK:
                yield bytes(rest)
                rest.clear()
                sent = True
    if rest or not sent:
        yield bytes(rest)


def _damaged(message: str) -> NoReturn:
    raise EntryError("damaged", message)
