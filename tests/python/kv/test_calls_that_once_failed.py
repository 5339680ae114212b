"""Calls that once gave wrong logits, a crash or a half-made context; each was seen to fail."""

from __future__ import annotations

from dataclasses import replace

import llama_cpp
import numpy as np
import pytest

from mixedkv import Llama, _core
from support.cache.harness import Ctx, InitError, Mixed, Uniform, prompt, rel_rms

pytestmark = pytest.mark.core

KV = Mixed(threshold=32, group=16, sinks=4)
OPEN = Mixed(threshold=256, group=32)  # a window over the whole context: equal to F16 but for rounding
tokens = prompt(200)


def continued(ctx: Ctx, n: int = 20, seq: int = 0) -> np.ndarray:
    return ctx.decode(tokens[150 : 150 + n], seq_ids=seq)


# --- states taken or restored while a shift or a copy is pending ---


def test_a_state_saved_after_a_shift_is_shifted(open_ctx, attention: str) -> None:
    kv = OPEN.with_(attention=attention)
    stayed, left = open_ctx("llama-64", kv, n_ctx=256), open_ctx("llama-64", kv, n_ctx=256)
    for ctx in (stayed, left):
        ctx.decode(tokens[:60])
        ctx.context_shift(4, 20)
    state = left.save_seq()
    left.clear()
    assert left.load_seq(state) == len(state)
    assert rel_rms(continued(left), continued(stayed)) < 3e-3


def test_a_state_saved_after_a_copy_has_the_copy(open_ctx, attention: str) -> None:
    ctx = open_ctx("llama-64", OPEN.with_(attention=attention), n_ctx=512, n_seq_max=2)
    ctx.decode(tokens[:60])
    ctx.cp(0, 1)
    state = ctx.save_seq(1)
    want = continued(ctx, seq=0)
    ctx.rm(1)
    assert ctx.load_seq(state, 1) == len(state)
    assert rel_rms(continued(ctx, seq=1), want) < 3e-3


def test_a_pending_copy_does_not_overwrite_what_is_restored(open_ctx, attention: str) -> None:
    ctx = open_ctx("llama-64", OPEN.with_(attention=attention), n_ctx=512, n_seq_max=2)
    ctx.decode(tokens[:60], seq_ids=1)
    state = ctx.save_seq(1)
    want = continued(ctx, seq=1)
    ctx.rm(1)
    ctx.decode(tokens[60:100], seq_ids=0)
    ctx.cp(0, 1)
    assert ctx.load_seq(state, 1) == len(state)
    assert rel_rms(continued(ctx, seq=1), want) < 3e-3


@pytest.mark.parametrize("cut", [0.2, 0.5, 0.8, 0.97])
def test_a_truncated_whole_state_leaves_an_empty_usable_context(open_ctx, cut: float) -> None:
    ctx = open_ctx("llama-64", KV)
    ctx.decode(tokens[:60])
    state = ctx.save()
    assert ctx.load(state[: int(cut * len(state))]) == 0
    assert ctx.pos_max() == -1
    assert ctx.stats()["n_cells_used"] == 0
    fresh = open_ctx("llama-64", KV)
    assert np.array_equal(ctx.decode(tokens[:40]), fresh.decode(tokens[:40]))


def test_states_of_windows_with_and_without_rows(open_ctx) -> None:
    """A cache without F16 rows takes a state that has none, and says so of one that has."""
    none = KV.with_(threshold=0, group=1, sinks=0)
    bare, ringed = open_ctx("llama-64", none), open_ctx("llama-64", KV)
    for ctx in (bare, ringed):
        ctx.decode(tokens[:60])
    state = bare.save_seq()
    assert ringed.load_seq(state) == len(state)
    assert ringed.sequences()[0]["n_hot"] == 0
    fresh = open_ctx("llama-64", KV)
    fresh.decode(tokens[:60])
    assert bare.load_seq(fresh.save_seq()) == 0
    assert bare.pos_max() == -1


# --- windows ---


@pytest.mark.parametrize("window", [(2**32 - 1, 1, 1), (0, 2**32 - 1, 4), (32, 16, 2**32 - 1)])
def test_windows_out_of_range_are_refused(open_ctx, window: tuple[int, int, int]) -> None:
    ctx = open_ctx("llama-64", KV)
    with pytest.raises(ValueError, match="quantization_threshold"):
        ctx.set_window(*window)
    stats = ctx.stats()
    assert (stats["threshold"], stats["group_size"], stats["sink_tokens"]) == (32, 16, 4)


def test_the_newest_rows_win_when_slots_run_short(open_ctx) -> None:
    """After a division two tokens share a position, so a window of positions holds more than its slots."""
    ctx = open_ctx("llama-64", KV, n_ctx=256)
    ctx.decode(tokens[:100])
    ctx.div(0, 0, -1, 2)
    for token in tokens[100:114]:
        ctx.decode([token])
    _, positions, hot = ctx.rows(0, "k")
    assert hot[positions >= positions.max() - 10].all()


# --- contexts and types ---


def test_a_float32_cache_with_the_fused_kernel(zoo_path) -> None:
    def logits(kv: str) -> np.ndarray:
        with Llama(zoo_path("llama-64"), kv=kv, n_ctx=256, logits_all=True, verbose=False) as llm:
            llm.eval(tokens[:60])
            return np.array(llm.scores[:60])

    assert rel_rms(logits("f32:attention=fused"), logits("f32")) < 1e-3


@pytest.mark.parametrize("kind", [4, 9999, -1])
def test_types_that_do_not_exist_are_refused(load, kind: int) -> None:
    model = load("llama-64")
    config = _core.CacheConfig(threshold=32, group_size=16, sink_tokens=4)
    with pytest.raises(ValueError, match="no type that a KV cache can have"):
        _core.check(model.address, config, kind, 2, 512)


def test_a_failed_context_does_not_leave_its_configuration_to_the_next(load) -> None:
    model = load("llama-64")
    _core.configure_next(_core.CacheConfig(threshold=32, group_size=16, sink_tokens=4))
    params = llama_cpp.llama_context_default_params()
    params.n_batch = params.n_ubatch = 0
    assert not llama_cpp.llama_init_from_model(model.ptr, params)
    with Ctx(model, Uniform()) as ctx:
        assert not ctx.stats()["mixed"]


def test_a_cache_that_shares_nothing_with_the_request_is_refused(load) -> None:
    with pytest.raises(InitError, match="flash_attn"):
        Ctx(load("llama-64"), replace(KV, flash=False))
