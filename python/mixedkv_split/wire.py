"""Puts on the wire: calls as split.proto has them, vectors as bytes, and the hash that client and server
keep of all of a session's.
"""

from __future__ import annotations

import hashlib
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf.message_factory import GetMessageClass

from mixedkv_split import split_pb2 as pb

Vectors = npt.NDArray[np.float32]

MAX_MESSAGE_BYTES = 64 << 20
MAX_HIDDEN = 64
SESSION_BYTES = HASH_BYTES = 16

_FORMATS: dict[int, np.dtype[Any]] = {pb.F16: np.dtype("<f2"), pb.F32: np.dtype("<f4")}
PRECISIONS: dict[str, pb.Precision] = {"f16": pb.F16, "f32": pb.F32}
_SERVICE = pb.DESCRIPTOR.services_by_name["Split"]
SERVICE_NAME: str = _SERVICE.full_name


class Stub:
    """The calls of a split server, each a method with its name in split.proto."""

    def __init__(self, channel: Any) -> None:
        for method in _SERVICE.methods:
            request, answer = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
            call = getattr(channel, _kind(method))
            path = f"/{SERVICE_NAME}/{method.name}"
            setattr(self, method.name, call(path, request.SerializeToString, answer.FromString))


def add_service(service: Any, server: grpc.aio.Server) -> None:
    """Let a server answer the calls by the methods of `service` with their names."""
    handlers = {}
    for method in _SERVICE.methods:
        request, answer = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        handle = getattr(grpc, f"{_kind(method)}_rpc_method_handler")
        handlers[method.name] = handle(
            getattr(service, method.name), request.FromString, answer.SerializeToString
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))


def _kind(method: Any) -> str:
    """Return gRPC's name for a call: unary_unary, stream_stream, ..."""
    streams = (method.client_streaming, method.server_streaming)
    return "_".join("stream" if each else "unary" for each in streams)


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
