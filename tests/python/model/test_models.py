"""Every kind of model with a mixed cache: which layers take it, and what it costs in accuracy."""

from __future__ import annotations

import numpy as np
import pytest

from support.cache.harness import TYPES, Mixed, Uniform, prompt, rel_rms
from support.models import zoo

pytestmark = [pytest.mark.core, pytest.mark.by_model]

KV = Mixed(threshold=32, group=16, sinks=4)


@pytest.mark.parametrize("name", zoo.SUPPORTED)
def test_attention_matters(open_ctx, name: str) -> None:
    """The models are worth testing on: an early token changes what comes much later."""
    tokens = prompt(60)
    other = [*tokens[:3], tokens[3] + 1, *tokens[4:]]
    a, b = (open_ctx(name, Uniform(k="f32", v="f32", flash=False)).decode(t)[-1:] for t in (tokens, other))
    assert rel_rms(b, a) > 0.01


@pytest.mark.parametrize("name", zoo.SUPPORTED)
def test_every_attention_layer_is_mixed(open_ctx, name: str, attention: str) -> None:
    shape = zoo.SHAPES[name]
    ctx = open_ctx(name, KV.with_(attention=attention))
    layers = {layer["il"]: layer for layer in ctx.layers()}
    assert sorted(layers) == sorted([*shape.kv_layers, *shape.swa_layers])
    assert all(layer["mixed"] for layer in layers.values())
    for il in shape.kv_layers:
        assert layers[il]["n_head_kv"] == shape.n_head_kv
        assert layers[il]["n_embd_head_k"] == shape.head
        assert layers[il]["n_embd_head_v"] == (0 if name == "deepseek2" else shape.head)  # within K
        assert (layers[il]["type_k"], layers[il]["type_v"]) == (TYPES["q4_0"], TYPES["q4_0"])
        assert layers[il]["fused"] == (attention == "fused")


@pytest.mark.parametrize("name", zoo.SUPPORTED)
def test_better_than_uniform_for_recent_tokens(open_ctx, name: str, attention: str) -> None:
    """A generation with a mixed cache is nearer to F32 than one with the uniform cold cache."""
    tokens = prompt(120)

    def generate(kv: Uniform | Mixed) -> np.ndarray:
        ctx = open_ctx(name, kv)
        return np.concatenate([ctx.decode(tokens[:60])] + [ctx.decode([t]) for t in tokens[60:]])

    f32 = generate(Uniform(k="f32", v="f32", flash=False))
    mixed = generate(KV.with_(attention=attention))
    assert np.isfinite(mixed).all()
    assert rel_rms(mixed, f32) < 0.9 * rel_rms(generate(Uniform(k="q4_0", v="q4_0")), f32)


@pytest.mark.parametrize("name", ["llama-64", "gemma2", "lfm2"])
@pytest.mark.parametrize("swa_full", [True, False])
def test_two_contexts_of_one_model(open_ctx, name: str, swa_full: bool) -> None:
    """Contexts with different caches side by side do not see each other."""
    kvs = [KV, Uniform(), KV.with_(k="q8_0", threshold=16), Uniform(k="q8_0", v="q8_0")]
    alone = [open_ctx(name, kv, swa_full=swa_full).decode(prompt(60)) for kv in kvs]
    many = [open_ctx(name, kv, swa_full=swa_full) for kv in kvs]
    parts = [[ctx.decode(prompt(60)[:30]) for ctx in many], [ctx.decode(prompt(60)[30:]) for ctx in many]]
    for i, want in enumerate(alone):
        got = np.concatenate([parts[0][i], parts[1][i]])
        assert max(rel_rms(a, b) for a, b in zip(got, want, strict=True)) < 3e-2
        assert [ctx.stats()["mixed"] for ctx in many][i] == isinstance(kvs[i], Mixed)


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "gemma4"])
def test_small_sliding_window_cache(open_ctx, name: str, attention: str) -> None:
    """With the sliding-window layers cut to their window, as is llama.cpp's default for many users."""
    tokens = prompt(150)
    kv = KV.with_(attention=attention)
    small = open_ctx(name, kv, swa_full=False, n_ubatch=32).decode(tokens)
    full = open_ctx(name, kv, swa_full=True, n_ubatch=32).decode(tokens)
    assert rel_rms(small, full) < 1e-2


def test_hybrid_state_is_carried(open_ctx, attention: str) -> None:
    """The recurrent part of a hybrid model works beside the mixed cache: sequences, copies, removal."""
    kv = KV.with_(attention=attention)
    ctx = open_ctx("lfm2", kv, n_seq_max=3, n_ctx=768, unified=True)
    alone = open_ctx("lfm2", kv)
    ctx.decode(prompt(50, seed=5), seq_ids=0)
    ctx.cp(0, 1)
    ctx.decode(prompt(10, seed=6), seq_ids=0)
    got = ctx.decode(prompt(10, seed=7), seq_ids=1)
    alone.decode(prompt(50, seed=5))
    want = alone.decode(prompt(10, seed=7))
    assert rel_rms(got, want) < 1e-2
    assert ctx.rm(0)
    ctx.decode(prompt(20, seed=8), positions=0, seq_ids=0)
    assert ctx.pos_max(0) == 19
