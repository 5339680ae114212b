"""Encrypted files and the master key: every change is found, every key has one place."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from mixedkv.store import key_from_environment, key_from_file
from mixedkv.store.encryption import (
    CHUNK,
    HEADER,
    KeyCipher,
    _rechunk,
    decrypt,
    encrypt,
    encrypted_size,
    parse_key_source,
)
from mixedkv.store.entry_row import EntryError

pytestmark = pytest.mark.core

KEY = AESGCM(bytes(range(32)))
CONTEXT = b"file" + bytes(32) + b"ab" * 16
MASTER = bytes(range(100, 132))


def to_bytes(plain: bytes, context: bytes = CONTEXT) -> bytes:
    return b"".join(encrypt(KEY, [memoryview(plain)], context))


def read(data: bytes, context: bytes = CONTEXT, key: AESGCM = KEY) -> bytes:
    return decrypt(key, io.BytesIO(data), len(data), context).tobytes()


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17])
def test_round_trip(size: int) -> None:
    plain = np.random.default_rng(size).bytes(size)
    data = to_bytes(plain)
    assert len(data) == encrypted_size(size)
    assert read(data) == plain


@given(st.lists(st.sampled_from([0, 1, 63, CHUNK // 2, CHUNK - 1, CHUNK, 2 * CHUNK + 1]), max_size=5))
def test_pieces_are_cut_into_chunks(sizes: list[int]) -> None:
    pieces = [memoryview(bytes([i]) * size) for i, size in enumerate(sizes)]
    chunks = [bytes(chunk) for chunk in _rechunk(pieces)]
    assert b"".join(chunks) == b"".join(pieces)
    assert all(len(chunk) == CHUNK for chunk in chunks[:-1])
    assert len(chunks) == max(1, -(-sum(sizes) // CHUNK))


def test_every_changed_byte_is_found() -> None:
    data = bytearray(to_bytes(b"some KV"))
    for i in range(len(data)):
        data[i] ^= 1 << i % 8
        with pytest.raises(EntryError):
            read(bytes(data))
        data[i] ^= 1 << i % 8
    assert read(bytes(data)) == b"some KV"


def test_every_length_but_its_own_is_found() -> None:
    data = to_bytes(b"some KV")
    for other in [*(data[:n] for n in range(len(data))), data + b"\0"]:
        with pytest.raises(EntryError):
            read(other)


def test_chunks_keep_their_order_and_number() -> None:
    data = to_bytes(bytes(3 * CHUNK))
    whole = CHUNK + 16
    chunks = [data[HEADER.size + i * whole : HEADER.size + (i + 1) * whole] for i in range(3)]
    magic, version, chunk, _ = HEADER.unpack(data[: HEADER.size])

    def assembled(parts: list[bytes], size: int) -> bytes:
        return HEADER.pack(magic, version, chunk, size) + b"".join(parts)

    assert read(assembled(chunks, 3 * CHUNK)) == bytes(3 * CHUNK)
    for parts in (
        chunks[::-1],
        [chunks[0], chunks[0], chunks[2]],
        chunks[:2],
        chunks[1:],
        [*chunks, chunks[2]],
    ):
        with pytest.raises(EntryError):
            read(assembled(parts, len(parts) * CHUNK))


def test_a_file_is_read_as_its_own_entry_with_its_own_key_only() -> None:
    data = to_bytes(b"some KV")
    for other in (b"", CONTEXT[:-1] + b"x", b"key" + CONTEXT[4:]):
        with pytest.raises(EntryError, match="chunk 0 of 1"):
            read(data, context=other)
    with pytest.raises(EntryError, match="chunk 0 of 1"):
        read(data, key=AESGCM(bytes(32)))


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        (0, b"X", "damaged"),
        (8, b"\x02", "version"),
        (12, b"\0\0\0\0", "damaged"),
        (16, b"\xff" * 8, "damaged"),
        (16, bytes(8), "damaged"),
    ],
)
def test_headers(at: int, value: bytes, reason: str) -> None:
    data = to_bytes(b"some KV")
    with pytest.raises(EntryError) as error:
        read(data[:at] + value + data[at + len(value) :])
    assert error.value.reason == reason


# --- keys ---


def test_data_keys_are_wrapped_for_one_entry() -> None:
    cipher = KeyCipher(lambda: MASTER)
    key, wrapped = cipher.new_key(b"key of a")
    sealed = cipher.seal(key, b"text", b"")
    assert cipher.unseal(cipher.open_key(wrapped, b"key of a"), sealed, b"") == b"text"
    changed = bytes([wrapped[0] ^ 1]) + wrapped[1:]
    for other, context in ((wrapped, b"key of b"), (changed, b"key of a"), (b"", b"key of a")):
        with pytest.raises(EntryError) as error:
            cipher.open_key(other, context)
        assert error.value.reason == "key"
    with pytest.raises(EntryError, match="master key"):
        KeyCipher(lambda: MASTER[::-1]).open_key(wrapped, b"key of a")


def test_vaults_differ_by_their_key_alone() -> None:
    a, b = KeyCipher(lambda: MASTER), KeyCipher(lambda: MASTER[::-1])
    assert a.key_id == KeyCipher(lambda: MASTER).key_id != b.key_id
    assert a.digest(b"x") == KeyCipher(lambda: MASTER).digest(b"x") != b.digest(b"x")
    assert a.new_key(b"")[1] != a.new_key(b"")[1]


WRITTEN: list[Callable[[bytes], bytes]] = [
    bytes,
    lambda key: key.hex().encode(),
    lambda key: key.hex().upper().encode() + b"\n",
    base64.b64encode,
    lambda key: base64.b64encode(key) + b"\n",
]


@pytest.mark.parametrize("mode", [0o600, 0o400])
@pytest.mark.parametrize("write", WRITTEN)
def test_key_file(tmp_path: Path, write: Callable[[bytes], bytes], mode: int) -> None:
    path = tmp_path / "key"
    path.write_bytes(write(MASTER))
    path.chmod(mode)
    assert key_from_file(path)() == parse_key_source(f"file:{path}")() == MASTER


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o610])
def test_a_key_file_that_others_may_open_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    path.write_bytes(MASTER)
    path.chmod(mode)
    with pytest.raises(PermissionError, match=f"mode {mode:04o}; chmod 600"):
        key_from_file(path)()


@pytest.mark.needs("root")
def test_a_key_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(MASTER)
    path.chmod(0o600)
    os.chown(path, 12345, -1)
    with pytest.raises(PermissionError, match="another user"):
        key_from_file(path)()


@pytest.mark.parametrize("content", [b"", b"short", bytes(31), bytes(33), b"zz" * 32, b"00" * 31])
def test_a_key_of_another_length_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="does not hold 32 bytes"):
        key_from_file(path)()
    with pytest.raises(ValueError, match="does not hold 32 bytes"):
        KeyCipher(lambda: content)


@pytest.mark.parametrize("text", ["0f" * 16, "a pass phrase of 32 characters!!"])
def test_a_text_of_32_letters_is_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """It would have half the bits, or fewer."""
    (tmp_path / "key").write_text(text)
    (tmp_path / "key").chmod(0o600)
    monkeypatch.setenv("SOME_KEY", text)
    for source in (key_from_file(tmp_path / "key"), key_from_environment("SOME_KEY")):
        with pytest.raises(ValueError, match="does not hold 32 bytes"):
            source()


def test_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", MASTER.hex())
    assert key_from_environment("SOME_KEY")() == parse_key_source("env:SOME_KEY")() == MASTER
    monkeypatch.delenv("SOME_KEY")
    with pytest.raises(ValueError, match="SOME_KEY is not set"):
        key_from_environment("SOME_KEY")()


@pytest.mark.parametrize("text", ["", "env", "env:", "SOME_KEY", "http://x"])
def test_unknown_key_sources(text: str) -> None:
    with pytest.raises(ValueError, match="use env:NAME or file:PATH"):
        parse_key_source(text)
