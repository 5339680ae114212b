"""Invariant 7: the fused and the merged path agree with double precision over the same stored rows, and so
with each other. The rows are read back from the cache: nothing here depends on how they came to be.
"""

from __future__ import annotations

import numpy as np
import pytest

import zoo
from checks import TOL_ORACLE
from harness import Mixed, prompt, rel_rms

KV = Mixed(threshold=40, group=8, sinks=4)
N = 180


def refill(ctx, oracle, seq: int = 0) -> None:
    """The oracle's rows become those that the cache reads for its next query."""
    for which in "kv":
        data, _, hot = ctx.rows(oracle._kv_layer(), which, seq)
        for row, values, is_hot in zip(oracle.rows(seq), data, hot, strict=True):
            setattr(row, f"{which}_{'hot' if is_hot else 'cold'}", values.astype(np.float64))


@pytest.mark.parametrize("n_next", [1, 2, 8])
@pytest.mark.parametrize("name", zoo.SUPPORTED)
def test_against_double_precision_over_the_stored_rows(
    open_pair, name: str, attention: str, n_next: int
) -> None:
    tokens = prompt(N + n_next)
    for il in zoo.SHAPES[name].kv_layers:
        # one group as long as the window: no row changes its tier between the reading and the last query
        ctx, oracle = open_pair(name, il, KV.with_(attention=attention, threshold=48, group=32))
        ctx.decode(tokens[:N])
        oracle.decode(tokens[:N])
        assert KV.with_(threshold=48, group=32).hot_begin(N) == KV.with_(threshold=48, group=32).hot_begin(
            N + 7
        )
        refill(ctx, oracle)
        got, want = ctx.decode(tokens[N:]), oracle.decode(tokens[N:])
        assert max(rel_rms(a, b) for a, b in zip(got, want, strict=True)) < TOL_ORACLE


@pytest.mark.parametrize("types", [("q4_0", "q4_0"), ("q8_0", "q4_0"), ("q8_0", "q8_0")], ids="-".join)
@pytest.mark.parametrize("name", zoo.SUPPORTED)
def test_fused_and_merged_agree(open_pair, has_fused: bool, name: str, types: tuple[str, str]) -> None:
    if not has_fused:
        pytest.skip("no fused kernel in this build")
    kv = KV.with_(k=types[0], v=types[1])
    il = zoo.SHAPES[name].kv_layers[-1]
    tokens = prompt(N + 20)
    out = []
    for how in ("fused", "merged"):
        ctx, _ = open_pair(name, il, kv.with_(attention=how), n_ubatch=64)
        out.append(np.concatenate([ctx.decode(tokens[:N])] + [ctx.decode([t]) for t in tokens[N:]]))
    assert max(rel_rms(a, b) for a, b in zip(*out, strict=True)) < TOL_ORACLE


@pytest.mark.parametrize("types", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", zoo.SUPPORTED)
def test_fused_attention_of_a_uniform_cache(load, open_ctx, has_fused: bool, name: str, types: str) -> None:
    """attention="fused" with kv="q8_0" and the like: same rows, the same answer as llama.cpp's own kernel."""
    if not has_fused:
        pytest.skip("no fused kernel in this build")
    import llama_cpp

    from harness import Uniform
    from mixedkv import _core

    kv = Uniform(k=types, v=types)
    tokens = prompt(100)
    want = open_ctx(name, kv).decode(tokens)
    f32 = open_ctx(name, Uniform(k="f32", v="f32", flash=False)).decode(tokens)
    _core.configure_next(False, 0, 1, 0, "fused")
    ctx = open_ctx(name, kv)
    assert any(layer["fused"] for layer in ctx.layers())
    assert not ctx.stats()["mixed"]
    got = ctx.decode(tokens)
    assert llama_cpp.llama_n_ctx(ctx.ptr) == 512
    # llama.cpp rounds Q to int8 for quantised K; for F16 both are within F16 rounding
    own = rel_rms(want, f32)
    assert rel_rms(got, want) < (own / 4 if types != "f16" else 2 * own)
