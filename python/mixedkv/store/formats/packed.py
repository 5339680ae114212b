"""The packed form of a cache: F16 arrays per layer, nothing else. docs/formats.md has the bytes.

Version 2 begins with the byte 0x02 and has any number of layers; the old flat form has one key and one value
and no version byte, so its first byte may be anything. Both are told apart by their whole structure.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any, Literal, get_args

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv.kv.block import KVBlock, LayerRows, RowGroup
from mixedkv.kv.evaluate_again import Rows, evaluate_again
from mixedkv.kv.row_source import RowSource
from mixedkv.kv.rows import FOREIGN, all_of
from mixedkv.tokens import as_tokens

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


Rotary = Literal["interleaved", "half"]


def rotary_of(llm: RowSource) -> Rotary:
    """Return which elements of a head of K this model's RoPE turns together.

    "interleaved" are neighbours: 0 and 1, 2 and 3, ... "half" are half a head apart: 0 and n/2, 1 and n/2+1.
    Llama models are "interleaved" in llama.cpp and "half" in transformers. Qwen's are "half" in both.
    """
    kind = llama_cpp.llama_model_rope_type(llm.model)
    return "interleaved" if kind == llama_cpp.LLAMA_ROPE_TYPE_NORM else "half"


def block_from_packed(
    layers: Sequence[tuple[Array, Array]], tokens: npt.ArrayLike, llm: RowSource, *, rotary: Rotary
) -> KVBlock:
    """Make a block of a packed cache, at positions from 0.

    The block is foreign: its rows count as inexact and are not stored. `load_packed` compares them with the
    model's own.

    Args:
        layers: K, turned by RoPE, and V of each layer, float16 [n_tokens, n_head_kv, head size],
            [n_tokens, n_head_kv * head size] or, as in transformers, [1, n_head_kv, n_tokens, head size].
        tokens: their ids, [n_tokens], which a packed cache does not have.
        llm: the model.
        rotary: which elements of a head of K were turned together, see `rotary_of`; "half" where the cache
            comes from transformers. A packed cache does not say.

    Raises:
        ValueError: the cache has other layers, heads or tokens than these, or `rotary` is unknown.
    """
    if rotary not in get_args(Rotary):
        raise ValueError(f"rotary={rotary!r}: use {' or '.join(map(repr, get_args(Rotary)))}")
    ids = as_tokens(tokens)
    n, shapes = len(ids), llm.kv.layers
    if n == 0:
        raise ValueError("tokens: give the id of each token of the packed cache")
    if len(layers) != len(shapes):
        raise ValueError(f"the packed cache has {len(layers)} layers, the model keeps rows of {len(shapes)}")
    own = rotary_of(llm)
    rows = []
    for (k, v), shape in zip(layers, shapes, strict=True):
        keys = _rows(f"layer {shape.il}: its key", k, n, shape.n_head_kv, shape.head_size_k)
        values = _rows(f"layer {shape.il}: its value", v, n, shape.n_head_kv, shape.head_size_v)
        if rotary != own:
            keys = _to_other_rotary(keys, min(_n_rot(llm), shape.head_size_k), own)
        rows.append(
            LayerRows(
                il=shape.il,
                type_k="f16",
                type_v="f16",
                rotation_k=0,
                rotation_v=0,
                n_head_kv=shape.n_head_kv,
                head_size_k=shape.head_size_k,
                head_size_v=shape.head_size_v,
                k=_bytes(keys),
                v=_bytes(values),
                k_hot=np.empty((0, shape.n_head_kv * shape.head_size_k), np.float16),
                v_hot=np.empty((0, shape.n_head_kv * shape.head_size_v), np.float16),
            )
        )
    none = np.empty(0, np.int32)
    group = RowGroup(positions=np.arange(n, dtype=np.int32), hot=none, slots=none, layers=tuple(rows))
    return KVBlock(p0=0, p1=n, tokens=ids, groups=(group,), validity=all_of(n, FOREIGN))


def packed_from_block(block: KVBlock) -> Layers:
    """Return key and value of every layer for `pack_kv_cache_v2`, float16 [n_tokens, n_head_kv, head size].

    K is in the layout that `rotary_of` names.

    Raises:
        ValueError: the block is of a cache that is not plain F16, or lacks rows of some layers.
    """
    layers: dict[int, tuple[Array, Array]] = {}
    for group in block.groups:
        if len(group.positions) != len(block):
            raise ValueError("layers with a sliding window have dropped rows: a packed cache has all of them")
        for layer in group.layers:
            if (layer.type_k, layer.type_v) != ("f16", "f16"):
                raise ValueError(
                    f"layer {layer.il} has rows of {layer.type_k} and {layer.type_v}, a packed cache F16: "
                    f"load the block into a cache with kv='f16' and export it there"
                )
            layers[layer.il] = (
                layer.k.view(np.float16).reshape(len(block), layer.n_head_kv, layer.head_size_k),
                layer.v.view(np.float16).reshape(len(block), layer.n_head_kv, layer.head_size_v),
            )
    return tuple(layers[il] for il in sorted(layers))


def _n_rot(llm: RowSource) -> int:
    """Return how many elements of a head RoPE turns; the others lie behind them."""
    architecture = llm.metadata.get("general.architecture", "")
    return int(llm.metadata.get(f"{architecture}.rope.dimension_count", 2**31))


def _rows(name: str, array: Array, n: int, n_head: int, size: int) -> Array:
    """Return the rows as [n, n_head, size]."""
    if array.shape == (1, n_head, n, size):
        by_token: Array = array[0].transpose(1, 0, 2)
        return by_token
    if array.shape not in ((n, n_head, size), (n, n_head * size)):
        raise ValueError(
            f"{name} has the shape {array.shape}: these tokens and this model have ({n}, {n_head}, {size})"
        )
    return array.reshape(n, n_head, size)


def _to_other_rotary(keys: Array, n_rot: int, target: Rotary) -> Array:
    """Convert rows to the other layout of RoPE, [n, n_head, size]."""
    pairs = (2, n_rot // 2) if target == "interleaved" else (n_rot // 2, 2)
    turned = keys[..., :n_rot].reshape(*keys.shape[:2], *pairs).swapaxes(2, 3)
    whole: Array = np.concatenate([turned.reshape(*keys.shape[:2], n_rot), keys[..., n_rot:]], axis=2)
    return whole


def _bytes(rows: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(rows, "<f2").reshape(len(rows), -1).view(np.uint8)


_CHECKED = 8  # tokens to evaluate at the beginning and at the end
_SAME_MODEL = (
    0.5  # median relative error over layers and tokens, of K and of V; a wrong layout has 1 and more
)
_EXACT = 0.02  # error by rounding to F16 and another order of sums
_ROW = 0.35  # of a single row of a layer: sound ones have 0.23 at most, those of another token 1 and more
_SAMPLE = 72  # tokens: where a tenth of all are wrong, one of these is with 9,994 in 10,000


def load_packed(
    llm: RowSource,
    layers: Sequence[tuple[Array, Array]],
    tokens: npt.ArrayLike,
    *,
    rotary: Rotary | Literal["auto"],
) -> float:
    """Load a packed session into the empty sequence 0 of a `Llama`, if its rows are those of this model.

    The first and the last tokens are evaluated again after the session's rows and compared. If they differ by
    more than rounding, as when another quantisation of the same model computed them, the session is loaded
    but counts as inexact: `llm.kv.exact_tokens` is 0, and no store keeps it. Otherwise 72 tokens in random
    places are evaluated again, and each of their rows is compared: of a session of up to 72 tokens, all.

    Args:
        llm: the model.
        layers, tokens, rotary: as in `block_from_packed`; "auto" takes the rotary layout that has the
            model's rows.

    Returns:
        The error of the rows as a share of their size: the median over layers and tokens, of K or V,
        whichever is larger.

    Raises:
        ValueError: the session does not fit the model, or its rows are not this model's for these tokens; the
            sequence is then empty. Or the sequence was not empty, or the model has a recurrent state.
    """
    if llm.kv.positions(0)[1] >= 0:
        raise ValueError("sequence 0 is not empty: remove what it holds with llm.kv.remove(0)")
    if not llm.kv.can_cut:
        raise ValueError("this model keeps a state of the whole sequence: a packed session has none")
    layouts = get_args(Rotary) if rotary == "auto" else (rotary,)
    blocks = [block_from_packed(layers, tokens, llm, rotary=each) for each in layouts]
    differences = []
    for block in blocks:
        try:
            differences.append(_difference(llm, block))
        finally:
            llm.kv.remove(0)
    off = float(np.nanmin([*differences, np.inf]))
    if not off <= _SAME_MODEL:
        remedy = (
            "" if rotary == "auto" else f" and rotary={rotary!r}: llama models of transformers have 'half'"
        )
        raise ValueError(
            f"the packed session is not this model's: its rows are off by {off:.2g} of their size. Check the "
            f"tokens, the model{remedy}"
        )
    block = blocks[differences.index(off)]
    if off <= _EXACT:
        try:
            _check_sample(llm, block)
        finally:
            llm.kv.remove(0)
    llm.kv.load(block.as_own(llm.kv.row_setting) if off <= _EXACT else block)
    return off


def _check_sample(llm: RowSource, block: KVBlock) -> None:
    """Evaluate a random sample of a block's tokens again.

    Raises:
        ValueError: a row is wrong.
    """
    n = len(block)
    chosen = sorted(random.SystemRandom().sample(range(n), min(n, _SAMPLE)))
    llm.kv.load(block)
    for begin in range(0, len(chosen), llm.n_batch):
        some = chosen[begin : begin + llm.n_batch]
        again = evaluate_again(llm.kv, 0, block.tokens, [(at, at + 1) for at in some])
        for (il, which), errors in again.errors.items():
            if errors.max(initial=0.0) > _ROW:
                at = some[int(errors.argmax())]
                raise ValueError(
                    f"the packed session is damaged, or not this model's: {which} of layer {il} at position "
                    f"{at} is off by {errors.max():.2g} of its size. Compute it again"
                )


def _difference(llm: RowSource, block: KVBlock) -> float:
    n = len(block)
    begin = min(_CHECKED // 2, n)
    spans = [(0, begin)] + ([(max(begin, n - _CHECKED // 2), n)] if n > begin else [])
    llm.kv.load(block)
    errors = evaluate_again(llm.kv, 0, block.tokens, spans).errors
    return max(_median(errors, "K"), _median(errors, "V"))


def _median(errors: Rows, which: str) -> float:
    return float(np.median([rows for (_, name), rows in errors.items() if name == which]))
