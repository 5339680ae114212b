"""Converts between packed caches and blocks with plain F16 rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv.kv.block import KVBlock, LayerRows, RowGroup
from mixedkv.kv.row_source import RowSource
from mixedkv.kv.rows import FOREIGN, all_of
from mixedkv.store.formats.packed import Array, Layers
from mixedkv.tokens import as_tokens

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
    return KVBlock(p0=0, p1=n, tokens=ids, groups=(group,), truth=all_of(n, FOREIGN))


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


def _to_other_rotary(keys: Array, n_rot: int, wanted: Rotary) -> Array:
    """Convert rows to the other layout of RoPE, [n, n_head, size]."""
    pairs = (2, n_rot // 2) if wanted == "interleaved" else (n_rot // 2, 2)
    turned = keys[..., :n_rot].reshape(*keys.shape[:2], *pairs).swapaxes(2, 3)
    whole: Array = np.concatenate([turned.reshape(*keys.shape[:2], n_rot), keys[..., n_rot:]], axis=2)
    return whole


def _bytes(rows: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(rows, "<f2").reshape(len(rows), -1).view(np.uint8)
