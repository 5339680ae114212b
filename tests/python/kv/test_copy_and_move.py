"""Copy and move of sequences between positions and sequences. (Named after the seed design.)

Each operation of llama_memory on a mixed cache, followed by decoding; every logit against the oracle.
"""

from __future__ import annotations

import numpy as np
import pytest

from support.cache.checks import assert_same, check_books, check_rows
from support.cache.harness import Mixed, prompt
from support.models import zoo

pytestmark = [pytest.mark.full, pytest.mark.merged_nightly]

KV = Mixed(threshold=24, group=8, sinks=3)

tokens = prompt(400, seed=3)


def start(open_pair, attention: str, name: str = "llama-64", n: int = 70, **options):
    kv = KV.with_(attention=attention)
    ctx, oracle = open_pair(name, zoo.SHAPES[name].kv_layers[-1], kv, **options)
    assert_same(ctx, oracle, tokens[:n])
    return ctx, oracle


def do(pair, operation: str, *args) -> None:
    for side in pair:
        getattr(side, operation)(*args)


# --- removal ---


@pytest.mark.parametrize("back", [1, 5, 24, 30, 60])
def test_rollback(open_pair, attention: str, back: int) -> None:
    """What has aged out stays cold after the tail goes; the window fills again from new tokens."""
    pair = ctx, oracle = start(open_pair, attention)
    do(pair, "rm", 0, 70 - back, -1)
    check_books(ctx, oracle)
    for i in range(4):
        assert_same(ctx, oracle, tokens[100 + 10 * i : 110 + 10 * i])
        check_books(ctx, oracle)
    check_rows(ctx, oracle)


def test_rollback_leaves_a_cold_gap(open_pair) -> None:
    """The promise in plain numbers: back to 30 of 70 tokens, the rows that were let go are not hot
    again.
    """
    ctx, _ = start(open_pair, "auto")
    ctx.rm(0, 30, -1)
    gone = KV.hot_begin(69 - KV.draft)
    assert gone > 30 > KV.hot_begin(29)
    assert ctx.rows(1, "k")[2].tolist() == [p < KV.sinks for p in range(30)]
    ctx.decode(tokens[:10])
    assert ctx.rows(1, "k")[2].tolist() == [p < KV.sinks or p >= 30 for p in range(40)]


@pytest.mark.parametrize("span", [(0, 2), (1, 30), (20, 60), (55, 60), (0, 70)])
def test_remove_a_span(open_pair, attention: str, span: tuple[int, int]) -> None:
    pair = ctx, oracle = start(open_pair, attention)
    do(pair, "rm", 0, *span)
    check_books(ctx, oracle)
    for i in range(3):
        assert_same(ctx, oracle, tokens[100 + 10 * i : 110 + 10 * i])
        check_books(ctx, oracle)


# --- moves ---


@pytest.mark.by_model
@pytest.mark.parametrize("name", zoo.SUPPORTED)
def test_context_shift(open_pair, attention: str, name: str) -> None:
    """RoPE is applied again to hot and cold rows; twice, with tokens between."""
    pair = ctx, oracle = start(open_pair, attention, name)
    for i in range(2):
        do(pair, "context_shift", 4, 30)
        assert_same(ctx, oracle, tokens[100 + 20 * i : 120 + 20 * i], shifted=True)
        check_books(ctx, oracle)
    check_rows(ctx, oracle)


def test_shifts_add_up_before_they_are_applied(open_pair, attention: str) -> None:
    pair = ctx, oracle = start(open_pair, attention)
    do(pair, "context_shift", 4, 10)
    do(pair, "context_shift", 4, 12)
    do(pair, "add", 0, 20, -1, 5)
    assert_same(ctx, oracle, tokens[100:130], shifted=True)
    check_books(ctx, oracle)


def test_rows_moved_below_zero_are_gone(open_pair, attention: str) -> None:
    pair = ctx, oracle = start(open_pair, attention)
    do(pair, "add", 0, 0, -1, -20)
    assert ctx.pos_max() == 49
    check_books(ctx, oracle)
    assert_same(ctx, oracle, tokens[100:120], shifted=True)
    check_books(ctx, oracle)


def test_divide_positions(open_pair, attention: str) -> None:
    """Self-extend: several tokens then share a position; slots may run short, the newest rows come first."""
    pair = ctx, oracle = start(open_pair, attention)
    do(pair, "div", 0, 8, 40, 4)
    check_books(ctx, oracle)
    assert_same(ctx, oracle, tokens[100:110], shifted=True)
    check_books(ctx, oracle)


def test_hot_and_cold_rows_turn_alike(open_ctx) -> None:
    """Rows moved by a shift equal the rows of tokens decoded at the new place, to rounding."""
    kv = KV.with_(threshold=64, group=8)
    moved, fresh = open_ctx("llama-64", kv), open_ctx("llama-64", kv)
    moved.decode(tokens[:60])
    moved.rm(0, 0, 20)
    moved.add(0, 20, -1, -20)
    moved.decode(tokens[60:61])
    fresh.decode(tokens[20:61])
    for side in (moved, fresh):
        assert side.rows(0, "k")[2].all()
    a, b = moved.rows(0, "k")[0], fresh.rows(0, "k")[0]
    assert np.abs(a - b).max() < 4e-3 * np.abs(b).max()  # two roundings to F16
    for side in (moved, fresh):
        side.set_window(0, 1, 0)
    a, b = moved.rows(0, "k")[0], fresh.rows(0, "k")[0]
    assert np.sqrt(np.mean((a - b) ** 2)) < 0.15 * np.sqrt(np.mean(b**2))  # quantised a second time


# --- copies ---


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
def test_copy_a_sequence_and_go_on_with_both(open_pair, attention: str, unified: bool) -> None:
    pair = ctx, oracle = start(open_pair, attention, n_seq_max=3, unified=unified, n_ctx=768)
    do(pair, "cp", 0, 2)
    check_books(ctx, oracle)
    for i in range(3):
        assert_same(ctx, oracle, tokens[100 + 9 * i : 109 + 9 * i], seq_ids=2)
        assert_same(ctx, oracle, tokens[200 + 5 * i : 205 + 5 * i], seq_ids=0)
        check_books(ctx, oracle)
    check_rows(ctx, oracle, 0)
    check_rows(ctx, oracle, 2)


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
def test_a_copy_goes_on_as_the_original(open_pair, unified: bool) -> None:
    ctx, _ = start(open_pair, "auto", n_seq_max=2, unified=unified, n_ctx=512)
    ctx.cp(0, 1)
    a = ctx.decode(tokens[100:110], seq_ids=0)
    b = ctx.decode(tokens[100:110], seq_ids=1)
    assert np.allclose(a, b, rtol=0, atol=1e-3)


def test_copy_of_a_part_within_a_stream(open_pair, attention: str) -> None:
    pair = ctx, oracle = start(open_pair, attention, n_seq_max=2, unified=True)
    do(pair, "cp", 0, 1, 0, 40)
    check_books(ctx, oracle)
    assert_same(ctx, oracle, tokens[100:120], seq_ids=1)
    assert_same(ctx, oracle, tokens[100:120], seq_ids=0)
    check_books(ctx, oracle)


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
def test_move_to_another_sequence(open_pair, attention: str, unified: bool) -> None:
    """Copy, drop the source, shift: what a server does to reuse a prompt's tail elsewhere."""
    pair = ctx, oracle = start(open_pair, attention, n_seq_max=2, unified=unified, n_ctx=512)
    do(pair, "cp", 0, 1)
    do(pair, "rm", 0, -1, -1)
    do(pair, "rm", 1, 0, 30)
    do(pair, "add", 1, 30, -1, -30)
    check_books(ctx, oracle)
    assert_same(ctx, oracle, tokens[100:130], seq_ids=1, shifted=True)
    assert_same(ctx, oracle, tokens[130:160], seq_ids=0)
    check_books(ctx, oracle)


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
def test_keep_one_sequence(open_pair, attention: str, unified: bool) -> None:
    pair = ctx, oracle = start(open_pair, attention, n_seq_max=3, unified=unified, n_ctx=768)
    do(pair, "cp", 0, 1)
    assert_same(ctx, oracle, tokens[100:120], seq_ids=1)
    do(pair, "keep", 1)
    check_books(ctx, oracle)
    assert_same(ctx, oracle, tokens[120:140], seq_ids=1)
    check_books(ctx, oracle)


def test_copy_onto_a_used_stream_replaces_it(open_pair, attention: str) -> None:
    pair = ctx, oracle = start(open_pair, attention, n_seq_max=2, n_ctx=512)
    assert_same(ctx, oracle, tokens[100:190], seq_ids=1)
    do(pair, "cp", 0, 1)
    check_books(ctx, oracle)
    assert_same(ctx, oracle, tokens[200:210], seq_ids=1)
    assert_same(ctx, oracle, tokens[210:220], seq_ids=0)
    check_books(ctx, oracle)
