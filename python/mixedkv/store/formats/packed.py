"""The packed form of a cache: F16 arrays per layer, nothing else. docs/formats.md has the bytes.

Version 2 begins with the byte 0x02 and has any number of layers; the old flat form has one key and one value
and no version byte, so its first byte may be anything. Both are told apart by their whole structure.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float16]
Layers = tuple[tuple[Array, Array], ...]

_VERSION = b"\x02"
_MAX_LAYERS = 1 << 16
_MAX_DIMS = 8
_MAX_BYTES = 2**32 - 1  # of one array: its length is a uint32
_F16 = np.dtype("<f2")


def pack_kv_cache_v2(layers: Sequence[tuple[Array, Array]]) -> bytes:
    """Pack the key and the value of every layer, each a float16 array of 1 to 8 dimensions.

    Raises:
        ValueError: an array is not float16, or is too large for the format; the message names it.
    """
    if len(layers) > _MAX_LAYERS:
        raise ValueError(f"{len(layers)} layers: the format holds at most {_MAX_LAYERS}")
    parts = [_VERSION, struct.pack("<I", len(layers))]
    for i, pair in enumerate(layers):
        parts += _pack_pair(f"layer {i}", pair)
    return b"".join(parts)


def pack_kv_cache(key: Array, value: Array) -> bytes:
    """Pack one key and one value in the flat form, which has no version byte; errors as above."""
    return b"".join(_pack_pair("cache", (key, value)))


def unpack_kv_cache_v2(data: bytes | bytearray | memoryview) -> Layers:
    """Return the key and value of every layer, as read-only views of `data`.

    Raises:
        ValueError: the bytes are not the packed form, version 2; the message says where.
    """
    reader = _Reader(data)
    if reader.take(1) != _VERSION:
        raise ValueError("packed cache: it does not begin with the version byte 0x02")
    n_layers = reader.number()
    # A pair takes at least 24 bytes: twice a length, a number of dimensions and one of them.
    if n_layers > min(_MAX_LAYERS, reader.left // 24):
        raise ValueError(f"packed cache: {reader.left} bytes cannot hold {n_layers} layers")
    layers = tuple((reader.array(), reader.array()) for _ in range(n_layers))
    reader.end()
    return layers


def unpack_kv_cache_flat(data: bytes | bytearray | memoryview) -> tuple[Array, Array]:
    """Return the key and the value of the flat form; otherwise as `unpack_kv_cache_v2`."""
    reader = _Reader(data)
    pair = reader.array(), reader.array()
    reader.end()
    return pair


def unpack_kv_cache(data: bytes | bytearray | memoryview) -> Layers:
    """Return the key and value of every layer, from either form; the flat one gives one layer.

    No bytes are both. The highest byte of version 2's number of layers is 0, and lies where the flat form has
    the lowest of its key's number of dimensions: that would be 0, or 256 and more.

    Raises:
        ValueError: the bytes are neither.
    """
    try:
        return unpack_kv_cache_v2(data)
    except ValueError as v2_error:
        try:
            return (unpack_kv_cache_flat(data),)
        except ValueError as flat_error:
            raise ValueError(
                f"neither form of a packed cache. Version 2: {v2_error}. Flat: {flat_error}"
            ) from None


def _pack_pair(where: str, pair: Any) -> list[bytes]:
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise ValueError(f"{where}: give a key and a value")
    parts: list[bytes] = []
    for name, array in zip(("key", "value"), pair, strict=True):
        if not isinstance(array, np.ndarray) or array.dtype != np.float16:
            kind = getattr(array, "dtype", type(array).__name__)
            raise ValueError(f"{where}: its {name} is {kind}; use a float16 array")
        if not 1 <= array.ndim <= _MAX_DIMS:
            raise ValueError(f"{where}: its {name} has {array.ndim} dimensions; use 1 to {_MAX_DIMS}")
        if array.nbytes > _MAX_BYTES or max(array.shape) > _MAX_BYTES:
            raise ValueError(f"{where}: its {name} has {array.nbytes} bytes; the format holds {_MAX_BYTES}")
        parts.append(struct.pack(f"<II{array.ndim}I", array.nbytes, array.ndim, *array.shape))
        parts.append(np.ascontiguousarray(array, dtype=_F16).tobytes())
    return parts


class _Reader:
    """Reads from front to back; allocates nothing that the bytes are not there for."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data).cast("B").toreadonly()
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, n: int) -> memoryview:
        if n > self.left:
            raise ValueError(f"packed cache: it is cut off at byte {len(self._data)}, {n - self.left} short")
        self._at += n
        return self._data[self._at - n : self._at]

    def number(self) -> int:
        return int(struct.unpack("<I", self.take(4))[0])

    def array(self) -> Array:
        at, n_bytes, n_dims = self._at, self.number(), self.number()
        if not 1 <= n_dims <= _MAX_DIMS:
            raise ValueError(f"packed cache: the array at byte {at} has {n_dims} dimensions")
        shape = struct.unpack(f"<{n_dims}I", self.take(4 * n_dims))
        n_elements = 1
        for n in shape:
            n_elements *= n
        if n_bytes != n_elements * _F16.itemsize:
            raise ValueError(f"packed cache: the array at byte {at} of shape {shape} has {n_bytes} bytes")
        return np.frombuffer(self.take(n_bytes), dtype=_F16).reshape(shape)

    def end(self) -> None:
        if self.left:
            raise ValueError(f"packed cache: {self.left} bytes follow after its end")
