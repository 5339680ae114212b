"""Vectors as bytes, and the hash that client and server keep of all of a session's."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from mixedkv.split import split_pb2 as pb

Vectors = npt.NDArray[np.float32]

MAX_MESSAGE_BYTES = 64 << 20
MAX_HIDDEN = 64
SESSION_BYTES = HASH_BYTES = 16

_FORMATS: dict[int, np.dtype[Any]] = {pb.F16: np.dtype("<f2"), pb.F32: np.dtype("<f4")}
PRECISIONS: dict[str, pb.Precision] = {"f16": pb.F16, "f32": pb.F32}


def pack(vectors: Vectors, precision: int) -> bytes:
    """Encode vectors [n, width] for the wire. Values beyond F16's range become its largest."""
    if precision == pb.F16:
        vectors = np.clip(vectors, -65504, 65504)
    return vectors.astype(_FORMATS[precision]).tobytes()


def unpack(data: bytes, n: int, width: int, precision: int) -> Vectors:
    """Decode vectors [n, width] from the wire.

    Raises:
        ValueError: the precision is unknown, the size does not fit, or a number is not finite.
    """
    if precision not in _FORMATS:
        raise ValueError(f"precision={precision}: use F16 or F32")
    size = n * width * _FORMATS[precision].itemsize
    if len(data) != size:
        raise ValueError(f"data: {n} vectors of {width} numbers have {size} bytes, not {len(data)}")
    vectors: Vectors = np.frombuffer(data, _FORMATS[precision]).reshape(n, width).astype(np.float32)
    if not np.isfinite(vectors).all():
        raise ValueError("data: a number is not finite")
    return vectors


def first_hash(pair: str, precision: int) -> bytes:
    """Return the running hash of a session without tokens."""
    return _hash(b"mixedkv.split.v1" + pair.encode() + bytes([precision]))


def next_hashes(before: bytes, data: bytes, n: int) -> list[bytes]:
    """Return the running hash after each of `n` vectors."""
    size, hashes = len(data) // n, []
    for i in range(n):
        before = _hash(before + data[i * size : (i + 1) * size])
        hashes.append(before)
    return hashes


def hash_after_drop(before: bytes, begin: int, end: int) -> bytes:
    """Return the running hash of a session that has dropped the tokens at positions [begin, end).

    Args:
        before: the running hash of all tokens, those included.
    """
    # 29 bytes follow the hash; a vector has an even number of them, so no vector gives the same
    return _hash(before + b"mixedkv.split.v1 drop" + begin.to_bytes(4, "little") + end.to_bytes(4, "little"))


def without_drop(message: pb.Vectors) -> pb.Vectors:
    """Return the message with which a session goes on that has dropped what this one asks for."""
    after = pb.Vectors()
    after.CopyFrom(message)
    after.position -= message.drop_end - message.drop_begin
    after.running_hash = hash_after_drop(message.running_hash, message.drop_begin, message.drop_end)
    after.ClearField("drop_begin")
    after.ClearField("drop_end")
    return after


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()
