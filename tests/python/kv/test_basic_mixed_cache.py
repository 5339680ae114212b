"""A mixed cache as most people use it: one sequence, a prompt, tokens after it. (Named after the seed
design.)
"""

from __future__ import annotations

import numpy as np
import pytest

from support.cache.checks import assert_same, check_books, check_rows
from support.cache.harness import TYPES, Mixed, prompt

pytestmark = pytest.mark.core

KV = Mixed(threshold=32, group=16, sinks=4)


def test_tokens_are_hot_until_the_threshold(open_ctx) -> None:
    """The 32nd query sees 32 hot tokens, itself included; for the 33rd the oldest 16 have left."""
    ctx = open_ctx("llama-64", KV.with_(sinks=0))
    ctx.decode(prompt(32))
    assert (ctx.sequences()[0]["n_hot"], ctx.sequences()[0]["n_cold"]) == (32, 0)
    ctx.decode([5])
    assert (ctx.sequences()[0]["n_hot"], ctx.sequences()[0]["n_cold"]) == (17, 16)


@pytest.mark.parametrize("n", [1, 31, 32, 33, 47, 48, 49, 64, 100, 333])
def test_the_oldest_group_leaves_together(open_ctx, n: int) -> None:
    """What the last query sees: sinks, and between T - G and T recent tokens, itself included."""
    ctx = open_ctx("llama-64", KV)
    ctx.decode(prompt(n))
    _, positions, hot = ctx.rows(0, "k")
    info = ctx.sequences()[0]
    assert positions.tolist() == list(range(n))
    assert info["hot_begin"] == KV.hot_begin(n - 1)
    assert info["hot_begin"] % KV.group == 0
    assert hot.tolist() == [KV.is_hot(n - 1, p) for p in range(n)]
    if n >= KV.threshold:
        assert KV.threshold - KV.group < n - info["hot_begin"] <= KV.threshold


def test_generation_follows_the_rule(open_pair, attention: str) -> None:
    ctx, oracle = open_pair("llama-64", 1, KV.with_(attention=attention))
    tokens = prompt(120)
    assert_same(ctx, oracle, tokens[:50])
    for token in tokens[50:]:
        assert_same(ctx, oracle, [token])
        check_books(ctx, oracle)
    check_rows(ctx, oracle)


def test_layers_and_statistics(open_ctx) -> None:
    ctx = open_ctx("llama-64", KV.with_(k="q8_0"), n_ctx=1024)
    ctx.decode(prompt(100))
    stats, layers = ctx.stats(), ctx.layers()
    assert stats["mixed"]
    assert (stats["threshold"], stats["threshold_capacity"]) == (32, 32)
    assert (stats["group_size"], stats["sink_tokens"]) == (16, 4)
    assert (stats["n_ctx_seq"], stats["n_seq_max"], stats["n_stream"], stats["n_layer"]) == (1024, 1, 1, 2)
    assert stats["n_cells_used"] == 100
    assert stats["n_cells_hot"] == sum(KV.is_hot(99, p) for p in range(100))
    assert stats["n_elements"] == 2 * 2 * 1024 * 2 * 64  # layers, K and V, cells, heads, head size
    assert stats["bytes_total"] == stats["bytes_cold"] + stats["bytes_hot"]
    for il, layer in enumerate(layers):
        assert layer["il"] == il
        assert layer["mixed"]
        assert (layer["n_head_kv"], layer["n_embd_head_k"], layer["n_embd_head_v"]) == (2, 64, 64)
        assert (layer["type_k"], layer["type_v"]) == (TYPES["q8_0"], TYPES["q4_0"])
        assert layer["n_cells"] == 1024
    assert sum(layer["bytes_cold"] for layer in layers) == stats["bytes_cold"]
    assert sum(layer["bytes_hot"] for layer in layers) == stats["bytes_hot"]


def test_rows_of_a_range(open_ctx) -> None:
    ctx = open_ctx("llama-64", KV)
    ctx.decode(prompt(60))
    every, _, hot = ctx.rows(1, "v")
    some, some_positions, some_hot = ctx.rows(1, "v", p0=10, p1=20)
    assert some.shape == (10, 2, 64)
    assert some_positions.tolist() == list(range(10, 20))
    assert np.array_equal(some, every[10:20])
    assert np.array_equal(some_hot, hot[10:20])
    assert len(ctx.rows(1, "v", p0=60)[1]) == 0


def test_clear_starts_over(open_pair, attention: str) -> None:
    ctx, oracle = open_pair("llama-64", 0, KV.with_(attention=attention))
    first = ctx.decode(prompt(70))
    for data in (True, False):
        ctx.clear(data)
        assert ctx.pos_max() == -1
        assert (ctx.stats()["n_cells_used"], ctx.stats()["n_cells_hot"]) == (0, 0)
        assert np.array_equal(ctx.decode(prompt(70)), first)
    oracle.decode(prompt(70))
    check_books(ctx, oracle)


def test_a_full_context_says_so_and_goes_on_after_room_is_made(open_pair, attention: str) -> None:
    ctx, oracle = open_pair("llama-64", 0, KV.with_(attention=attention), n_ctx=256)
    assert_same(ctx, oracle, prompt(256))
    ctx.context_shift(4, 100)
    oracle.context_shift(4, 100)
    assert_same(ctx, oracle, prompt(50, seed=2), shifted=True)
    check_books(ctx, oracle)
