"""Invariant 7: the fused and the merged path agree with double precision over the same stored rows, and so
with each other. The rows are read back from the cache: nothing here depends on how they came to be.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from support.cache.checks import TOL_FUSED, TOL_MERGED, distances, tolerance, worst
from support.cache.harness import Mixed, Uniform, prompt
from support.models import zoo

pytestmark = [pytest.mark.core, pytest.mark.by_model]

KV = Mixed(threshold=40, group=8, sinks=4)
N = 180


def refill(ctx, oracle, seq: int = 0) -> None:
    """The oracle's rows become those that the cache reads for its next query."""
    for which in oracle.parts:
        data, _, hot = ctx.rows(oracle._kv_layer(), which, seq)
        for row, values, is_hot in zip(oracle.rows(seq), data, hot, strict=True):
            setattr(row, f"{which}_{'hot' if is_hot else 'cold'}", values.astype(np.float64))


@pytest.mark.parametrize(
    ("name", "n_next"), [("llama-64", 1), ("llama-64", 2), *zip(zoo.SUPPORTED, itertools.cycle((8, 1, 2)))]
)
def test_against_double_precision_over_the_stored_rows(
    open_pair, name: str, attention: str, n_next: int
) -> None:
    for il in zoo.SHAPES[name].kv_layers:
        # one group as long as the window: no row changes its tier between the reading and the last query
        ctx, oracle = open_pair(name, il, KV.with_(attention=attention, threshold=48, group=32))
        tokens = oracle.safe(prompt(N + n_next), range(N + n_next))
        ctx.decode(tokens[:N])
        oracle.decode(tokens[:N])
        assert KV.with_(threshold=48, group=32).hot_begin(N) == KV.with_(threshold=48, group=32).hot_begin(
            N + 7
        )
        refill(ctx, oracle)
        got, want = ctx.decode(tokens[N:]), oracle.decode(tokens[N:])
        assert worst(got, want) < tolerance(ctx.kv)


@pytest.mark.parametrize("types", [("q4_0", "q4_0"), ("q8_0", "q4_0"), ("q8_0", "q8_0")], ids="-".join)
@pytest.mark.parametrize("name", zoo.SUPPORTED)
def test_fused_and_merged_agree(open_pair, has_fused: bool, name: str, types: tuple[str, str]) -> None:
    if not has_fused:
        pytest.skip("no fused kernel in this build")
    kv = KV.with_(k=types[0], v=types[0] if name == "deepseek2" else types[1])
    il = zoo.SHAPES[name].kv_layers[-1]
    tokens = prompt(N + 20)
    both = [open_pair(name, il, kv.with_(attention=how), n_ubatch=64)[0] for how in ("fused", "merged")]
    both[0].decode(tokens[:N])
    both[1].load(both[0].save())  # of the same stored rows: merged stores Q4_0 in other scales
    out = [[ctx.decode(tokens[N:-9]), *(ctx.decode([t]) for t in tokens[-9:])] for ctx in both]
    assert worst(*map(np.concatenate, out)) < TOL_MERGED


@pytest.mark.parametrize("types", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", zoo.SUPPORTED)
def test_fused_attention_of_a_uniform_cache(open_pair, has_fused: bool, name: str, types: str) -> None:
    """attention="fused" beside kv="q8_0" and the like: llama.cpp's rows, read by the same node."""
    if not has_fused:
        pytest.skip("no fused kernel in this build")
    from mixedkv import _core

    _core.configure_next(_core.CacheConfig(mixed=False, attention="fused"))
    ctx, oracle = open_pair(name, zoo.SHAPES[name].kv_layers[-1], Uniform(k=types, v=types))
    assert {layer["il"]: layer["fused"] for layer in ctx.layers()}[oracle.il]
    assert not ctx.stats()["mixed"]
    tokens = oracle.safe(prompt(N + 10), range(N + 10))
    got = np.concatenate([ctx.decode(tokens[:N])] + [ctx.decode([t]) for t in tokens[N:]])
    far = distances(got, oracle.decode(tokens))
    assert np.median(far) < TOL_FUSED
    assert max(far) < TOL_MERGED  # of q8_0 a few elements land on the next step
