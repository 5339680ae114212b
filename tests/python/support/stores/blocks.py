"""Blocks and identities without a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from mixedkv.kv.block import KVBlock, LayerRows, RowGroup, row_bytes
from mixedkv.kv.rows import COMPUTED, all_of
from mixedkv.store import Identity, KVStore
from mixedkv.store.results import Match

N_HEAD_KV, HEAD = 2, 32
WIDTH = N_HEAD_KV * HEAD


def identity(kv: str = "f16", *, tenant: str = "", **facts: object) -> Identity:
    return Identity.from_facts({"kv": kv, "model": "a", **facts}, tenant=tenant, label=f"a.gguf {kv}")


def stored_match(store: KVStore, who: Identity, tokens: Any, **options: Any) -> Match:
    """Return the match for tokens that are stored."""
    match = store.find(who, tokens, **options)
    assert match is not None
    return match


def make_block(
    tokens: list[int] | np.ndarray,
    p0: int = 0,
    *,
    kind: str = "f16",
    n_layers: int = 2,
    hot: list[int] | None = None,
    window: list[int] | None = None,
    seed: int = 0,
    validity: int = COMPUTED,
) -> KVBlock:
    """A block of random rows. `hot` are positions with an F16 copy, `window` those that a second group of
    layers has, as a sliding window would. `validity` is what all rows are said to be.
    """
    rng = np.random.default_rng([seed, p0, len(tokens)])
    p1 = p0 + len(tokens)
    groups = [_group(rng, list(range(p0, p1)), hot or [], kind, range(n_layers))]
    if window is not None:
        groups.append(_group(rng, window, hot or [], kind, range(n_layers, n_layers + 1)))
    ids, known = np.array(tokens, np.int32), all_of(len(tokens), validity)
    return KVBlock(p0=p0, p1=p1, tokens=ids, groups=tuple(groups), validity=known)


def _group(
    rng: np.random.Generator, positions: list[int], hot: list[int], kind: str, layers: Iterable[int]
) -> RowGroup:
    at = np.array(positions, np.int32)
    hot_rows = np.flatnonzero(np.isin(at, hot)).astype(np.int32)

    def layer(il: int) -> LayerRows:
        size = row_bytes(kind, WIDTH)
        cold = [rng.integers(0, 256, (len(at), size), np.uint8) for _ in "kv"]
        f16 = [rng.standard_normal((len(hot_rows), WIDTH)).astype(np.float16) for _ in "kv"]
        rotation = 0 if kind == "f16" else HEAD
        return LayerRows(
            il=il,
            type_k=kind,
            type_v=kind,
            rotation_k=rotation,
            rotation_v=rotation,
            n_head_kv=N_HEAD_KV,
            head_size_k=HEAD,
            head_size_v=HEAD,
            k=cold[0],
            v=cold[1],
            k_hot=f16[0],
            v_hot=f16[1],
        )

    slots = np.arange(len(hot_rows), dtype=np.int32)[::-1].copy()
    return RowGroup(positions=at, hot=hot_rows, slots=slots, layers=tuple(map(layer, layers)))


def same(a: KVBlock, b: KVBlock) -> bool:
    """Equal in every field and bit."""
    x, y = a.to_arrays(), b.to_arrays()
    return (
        a.describe() == b.describe()
        and x.keys() == y.keys()
        and all(x[name].dtype == y[name].dtype and np.array_equal(x[name], y[name]) for name in x)
    )


def put_chain(store: KVStore, who: Identity, tokens: list[int], ends: list[int]) -> list[str]:
    """Store tokens in several entries that build on each other."""
    entries = []
    begin = 0
    for end in ends:
        parent = store.find(who, tokens[:begin]) if begin else None
        assert (parent.n_tokens if parent else 0) == begin
        entries.append(store.put(who, make_block(tokens[begin:end], begin), parent))
        begin = end
    return entries
