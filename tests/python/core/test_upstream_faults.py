"""Faults of llama.cpp that a patch mends and no other test would show: vendor/upstream has their texts."""

from __future__ import annotations

from typing import Any

import llama_cpp
import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from support.cache.harness import Uniform, prompt, rel_rms

pytestmark = pytest.mark.full

TOKENS = prompt(120, seed=12)


@pytest.mark.by_model
@pytest.mark.parametrize("name", ["llama-64", "llama-96"])  # with and without a rotation of quantised heads
@pytest.mark.parametrize("type_", ["bf16", "q8_0"])
def test_a_context_shift_of_any_cache(open_ctx: Any, name: str, type_: str) -> None:
    shifted, want = open_ctx(name, Uniform(k=type_, v=type_)), open_ctx(name, Uniform())
    for side in (shifted, want):
        side.decode(TOKENS[:70])
        side.context_shift(4, 30)
    assert rel_rms(shifted.decode(TOKENS[70:90]), want.decode(TOKENS[70:90])) < 0.1


@pytest.mark.parametrize("unified", [True, False])
def test_sequences_need_not_divide_a_micro_batch(unified: bool) -> None:
    options: dict[str, Any] = {"n_ctx": 768, "n_batch": 64, "n_ubatch": 64, "n_threads": 1, "verbose": False}
    pooling = llama_cpp.LLAMA_POOLING_TYPE_MEAN
    with Llama(
        model_path(), embedding=True, pooling_type=pooling, n_seq_max=3, kv_unified=unified, **options
    ) as llm:
        assert len(llm.embed("The code of the mill is 4817.")) > 0
