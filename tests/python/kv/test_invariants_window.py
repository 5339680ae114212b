"""Live settings: a smaller window lets rows go, a wider one fills from new tokens alone."""

from __future__ import annotations

import pytest

from support.checks import assert_same, check_books, check_rows
from support.harness import Mixed, prompt

pytestmark = pytest.mark.core

KV = Mixed(threshold=48, group=8, sinks=4)
tokens = prompt(400, seed=8)


def start(open_pair, attention: str = "auto", **options):
    pair = ctx, oracle = open_pair("llama-64", 1, KV.with_(attention=attention), **options)
    assert_same(ctx, oracle, tokens[:100])
    return pair


def set_window(pair, *window: int) -> None:
    for side in pair:
        side.set_window(*window)


def test_smaller_then_wider(open_pair, attention: str) -> None:
    pair = ctx, oracle = start(open_pair, attention)
    set_window(pair, 16, 4, 2)
    check_books(ctx, oracle)
    assert ctx.stats()["threshold"] == 16
    assert ctx.stats()["threshold_capacity"] == 50  # two sinks less
    set_window(pair, 48, 8, 4)
    check_books(ctx, oracle)
    hot = ctx.rows(1, "k")[2]
    kept = KV.with_(threshold=16, group=4, sinks=2)
    assert hot.tolist() == [kept.is_hot(99, p) for p in range(100)], "rows came back that had been let go"
    for i in range(6):
        assert_same(ctx, oracle, tokens[100 + 10 * i : 110 + 10 * i])
        check_books(ctx, oracle)
    assert (
        ctx.rows(1, "k")[2].sum() == sum(KV.is_hot(159, p) for p in range(160)) - 2
    )  # two sinks are gone for good
    check_rows(ctx, oracle)


def test_closed_and_opened_again(open_pair, attention: str) -> None:
    pair = ctx, oracle = start(open_pair, attention)
    set_window(pair, 0, 1, 0)
    assert ctx.stats()["n_cells_hot"] == 0
    assert_same(ctx, oracle, tokens[100:130])
    assert ctx.stats()["n_cells_hot"] == 0
    set_window(pair, 32, 8, 4)
    assert_same(ctx, oracle, tokens[130:150])
    assert ctx.rows(1, "k")[2].tolist() == [p >= 130 for p in range(150)]
    check_books(ctx, oracle)
    check_rows(ctx, oracle)


def test_group_alone(open_pair, attention: str) -> None:
    pair = ctx, oracle = start(open_pair, attention)
    set_window(pair, 48, 1, 4)
    for i in range(3):
        assert_same(ctx, oracle, tokens[100 + 7 * i : 107 + 7 * i])
        check_books(ctx, oracle)


def test_several_sequences(open_pair, attention: str) -> None:
    pair = ctx, oracle = start(open_pair, attention, n_seq_max=2, unified=True)
    for side in pair:
        side.cp(0, 1)
    assert_same(ctx, oracle, tokens[200:260], seq_ids=1)
    set_window(pair, 24, 8, 0)
    check_books(ctx, oracle)
    for seq in (0, 1):
        assert_same(ctx, oracle, tokens[100:120], seq_ids=seq)
        check_books(ctx, oracle)


@pytest.mark.parametrize(
    ("window", "word"),
    [
        ((2**31, 8, 4), "quantization_threshold"),
        ((16, 0, 4), "group_size"),
        ((16, 17, 4), "group_size"),
        ((48, 8, 2**31), "sink_tokens"),
    ],
)
def test_wrong_windows_are_refused_and_change_nothing(
    open_pair, window: tuple[int, int, int], word: str
) -> None:
    ctx, oracle = start(open_pair)
    before = ctx.stats()
    with pytest.raises(ValueError, match=word):
        ctx.set_window(*window)
    assert ctx.stats() == before
    check_books(ctx, oracle)
    assert_same(ctx, oracle, tokens[100:110])
