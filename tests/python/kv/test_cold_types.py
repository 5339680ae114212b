"""Every cold type: the kernels read the rows that llama.cpp's conversion wrote, as llama.cpp reads them."""

from __future__ import annotations

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.config.mixed import COLD_TYPES, OWN_TYPES
from support.cache.harness import Mixed, Uniform, prompt, rel_rms

pytestmark = pytest.mark.core


@pytest.mark.parametrize("model", ["llama-64", "llama-128"])
@pytest.mark.parametrize("cold", COLD_TYPES)
def test_both_attentions_read_the_same(open_ctx, cold: str, model: str) -> None:
    """Merged casts to F16 and sums values in it; the types are whole percents apart from F32."""
    fused, merged = read_by_both(open_ctx, model, cold, cold)
    assert np.median([rel_rms(*both) for both in zip(fused, merged, strict=True)]) < 0.015


@pytest.mark.parametrize("cold", COLD_TYPES)
def test_types_may_differ(open_ctx, cold: str) -> None:
    assert rel_rms(*read_by_both(open_ctx, "llama-64", cold, "q4_0")) < 0.015


def read_by_both(open_ctx, model: str, k: str, v: str) -> list[np.ndarray]:
    """Logits of tokens behind the same stored rows. Merged would store Q4_0 and Q5_0 in other scales."""
    both = [
        open_ctx(model, Mixed(k=k, v=v, threshold=16, group=8, attention=attention))
        for attention in ("fused", "merged")
    ]
    both[0].decode(prompt(200))
    both[1].load(both[0].save())
    return [np.concatenate([ctx.decode([token]) for token in prompt(12, seed=2)]) for ctx in both]


@pytest.mark.parametrize("cold", OWN_TYPES)
def test_heads_that_a_block_does_not_divide_are_refused(open_ctx, cold: str) -> None:
    with pytest.raises(RuntimeError, match=rf"{cold}.*64 elements.*use a type with blocks of 32, as q4_0"):
        open_ctx("llama-96", Mixed(k=cold, v=cold))


@pytest.mark.parametrize("cold", OWN_TYPES)
def test_llama_cpps_own_cache_of_our_types(open_ctx, cold: str) -> None:
    """They are types of ggml: a cache without a window has the rows of one that is not mixed."""
    tokens = prompt(100)
    uniform = open_ctx("llama-64", Uniform(k=cold, v=cold)).decode(tokens)
    kv = Mixed(k=cold, v=cold, threshold=0, sinks=0, equalize=False, attention="merged")
    assert rel_rms(uniform, open_ctx("llama-64", kv).decode(tokens)) < 0.01


@pytest.mark.parametrize("gone", ["q4_1", "q5_1", "iq4_nl"])
def test_stored_rows_of_a_type_that_was_taken_out_are_converted(gone: str) -> None:
    """They are llama.cpp's own types still, so a block that was written with them is read."""
    options = {"n_ctx": 512, "n_threads": 1, "verbose": False}
    with (
        Llama(model_path(), kv=gone, **options) as old,  # type: ignore[arg-type]
        Llama(model_path(), kv="mixed:cold=q8_0", **options) as new,  # type: ignore[arg-type]
    ):
        old.eval(prompt(100))
        new.kv.load(old.kv.export())
        for rows in ("k", "v"):
            was, now = (getattr(llm.kv.layer(2), rows)(basis="model") for llm in (old, new))
            assert rel_rms(now, was) < 0.02
