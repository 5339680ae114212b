"""Packed caches and blocks: the rows of one are those of the other, where a block has plain F16 rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mixedkv.kv.block import KVBlock, LayerRows, RowGroup
from mixedkv.kv.stats import LayerStats
from mixedkv.store.formats.packed import Array, Layers
from mixedkv.tokens import as_tokens


def block_from_packed(
    layers: Sequence[tuple[Array, Array]], tokens: npt.ArrayLike, shapes: Sequence[LayerStats]
) -> KVBlock:
    """The block of a packed cache, at positions from 0. Any cache of its model loads it: rows are converted.

    Args:
        layers: K, turned by RoPE, and V of each layer, float16 [n_tokens, n_head_kv, head size] or
            [n_tokens, n_head_kv * head size].
        tokens: their ids, [n_tokens], which a packed cache does not have.
        shapes: of the model's layers, `llm.kv.layers`.

    Raises:
        ValueError: it has other layers, heads or tokens than these; the message names the array.
    """
    ids = as_tokens(tokens)
    n = len(ids)
    if n == 0:
        raise ValueError("tokens: give the id of each token of the packed cache")
    if len(layers) != len(shapes):
        raise ValueError(f"the packed cache has {len(layers)} layers, the model keeps rows of {len(shapes)}")
    rows = []
    for (k, v), shape in zip(layers, shapes, strict=True):
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
                k=_rows(f"layer {shape.il}: its key", k, n, shape.n_head_kv, shape.head_size_k),
                v=_rows(f"layer {shape.il}: its value", v, n, shape.n_head_kv, shape.head_size_v),
                k_hot=np.empty((0, shape.n_head_kv * shape.head_size_k), np.float16),
                v_hot=np.empty((0, shape.n_head_kv * shape.head_size_v), np.float16),
            )
        )
    none = np.empty(0, np.int32)
    group = RowGroup(positions=np.arange(n, dtype=np.int32), hot=none, slots=none, layers=tuple(rows))
    return KVBlock(p0=0, p1=n, tokens=ids, groups=(group,))


def packed_from_block(block: KVBlock) -> Layers:
    """Key and value of every layer for `pack_kv_cache_v2`, float16 [n_tokens, n_head_kv, head size].

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


def _rows(name: str, array: Array, n: int, n_head: int, size: int) -> npt.NDArray[np.uint8]:
    if array.shape not in ((n, n_head, size), (n, n_head * size)):
        raise ValueError(
            f"{name} has the shape {array.shape}: these tokens and this model have ({n}, {n_head}, {size})"
        )
    return np.ascontiguousarray(array, "<f2").reshape(n, -1).view(np.uint8)
