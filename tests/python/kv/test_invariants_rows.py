"""Invariants 1 and 2: each visible (query, key) pair uses exactly one row, the right one.

A double-precision oracle applies the hot-set rule pair by pair to rows that it rounded and quantised
itself. Mutants of the rule show what the tolerance can tell apart.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from support.cache.checks import check_books, check_rows, tolerance, worst
from support.cache.harness import Mixed, prompt, rel_rms
from support.cache.oracle import Oracle, Row
from support.models import zoo

pytestmark = [pytest.mark.core, pytest.mark.by_model]

# every full-attention layer; gemma4's layer 5 reads the rows of layer 3
LAYERS = [(name, il) for name in zoo.SUPPORTED for il in zoo.SHAPES[name].kv_layers] + [("gemma4", 5)]
IDS = [f"{name}-layer{il}" for name, il in LAYERS]

N_PROMPT, N_SINGLE = 44, 12
WINDOW = Mixed(threshold=12, group=4, sinks=2)


def both(open_pair, name: str, il: int, kv: Mixed) -> tuple[np.ndarray, np.ndarray, Oracle]:
    """Logits of a prompt in micro-batches and single tokens after it, from the cache and from the oracle."""
    ctx, oracle = open_pair(name, il, kv, n_ubatch=16)
    tokens = oracle.safe(prompt(N_PROMPT + N_SINGLE), range(N_PROMPT + N_SINGLE))
    parts = [ctx.decode(tokens[:N_PROMPT])] + [ctx.decode([t]) for t in tokens[N_PROMPT:]]
    want = oracle.decode(tokens)
    check_books(ctx, oracle)
    check_rows(ctx, oracle)
    return np.concatenate(parts), want, oracle


@pytest.mark.parametrize(("name", "il"), LAYERS, ids=IDS)
def test_every_pair_uses_the_right_row(open_pair, name: str, il: int, attention: str) -> None:
    kv = WINDOW.with_(attention=attention)
    got, want, oracle = both(open_pair, name, il, kv)
    assert worst(got, want) < tolerance(kv)
    # one key's row exchanged for each query is enough to be seen
    for shift in (-1, 1):
        assert rel_rms(mutant(oracle, shift), want) > 3 * tolerance(kv)


def mutant(oracle: Oracle, shift: int) -> np.ndarray:
    """Logits when the window of each query begins `shift` positions away from the rule."""

    class Shifted(Mixed):
        def hot_begin(self, q: int) -> int:
            return super().hot_begin(q) + shift

    tokens = oracle.safe(prompt(N_PROMPT + N_SINGLE), range(N_PROMPT + N_SINGLE))
    other = oracle.copy()
    other.clear()
    rule = {key: getattr(WINDOW, key) for key in ("k", "v", "threshold", "group", "sinks")}
    other.kv = Shifted(**rule)
    return other.decode(tokens)


SETTINGS = {
    "all hot": WINDOW.with_(threshold=256, group=256),
    "all cold": WINDOW.with_(threshold=0, sinks=0),
    "sinks alone": WINDOW.with_(threshold=0, sinks=5),
    "one by one": WINDOW.with_(threshold=9, group=1, sinks=0),
    "whole window at once": WINDOW.with_(threshold=8, group=8),
    "group does not divide the window": WINDOW.with_(threshold=13, group=5, sinks=3),
    "sinks reach into the window": WINDOW.with_(threshold=16, group=8, sinks=50),
    "longer than a micro-batch": WINDOW.with_(threshold=32, group=8),
}


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        *(("llama-64", setting) for setting in SETTINGS),
        *zip(itertools.cycle(("llama-96", "refact", "gpt-oss")), SETTINGS),  # two or three settings each
    ],
)
def test_any_window(open_pair, name: str, setting: str, attention: str) -> None:
    kv = SETTINGS[setting].with_(attention=attention)
    got, want, _ = both(open_pair, name, zoo.SHAPES[name].kv_layers[-1], kv)
    assert worst(got, want) < tolerance(kv)


@pytest.mark.parametrize(
    "types",
    [("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q8_0"), ("q5_0", "q5_0"), ("lm4", "lm4"), ("tc3", "tc3")],
    ids="-".join,
)
@pytest.mark.parametrize("name", ["llama-128", "qwen3"])
def test_types_of_k_and_v_are_independent(
    open_pair, name: str, types: tuple[str, str], attention: str
) -> None:
    kv = WINDOW.with_(k=types[0], v=types[1], attention=attention)
    got, want, _ = both(open_pair, name, 0, kv)
    assert worst(got, want) < tolerance(kv)


@pytest.mark.parametrize("il", [0, 1])
def test_layers_have_types_of_their_own(open_pair, il: int, attention: str) -> None:
    kv = WINDOW.with_(v="q8_0", layers=((1, -1, "q8_0", "q5_0"),), attention=attention)
    got, want, _ = both(open_pair, "llama-64", il, kv)
    assert worst(got, want) < tolerance(kv)


def test_the_cold_row_is_there_from_the_start(open_pair) -> None:
    """Closing the window shows the cold copy of rows that were hot, equal to their quantised value."""
    ctx, oracle = open_pair("llama-64", 0, WINDOW.with_(threshold=32, group=8))
    ctx.decode(prompt(40))
    oracle.decode(prompt(40))
    assert ctx.rows(0, "k")[2].sum() > 24
    ctx.set_window(0, 1, 0)
    oracle.set_window(0, 1, 0)
    assert not ctx.rows(0, "k")[2].any()
    check_books(ctx, oracle)
    check_rows(ctx, oracle)


def test_unrotate_gives_back_the_plain_keys(open_pair) -> None:
    """A scaled and rotated row of the cache, turned back, is the K that the model computed."""
    from support.cache.oracle import rotate

    ctx, oracle = open_pair("llama-128", 0, WINDOW)
    ctx.decode(prompt(30))
    oracle.decode(prompt(30))
    rows: list[Row] = oracle.rows()
    plain, _, hot = ctx.rows(0, "k", unrotate=True)
    turned, _, _ = ctx.rows(0, "k")
    want = np.stack([rotate(r.k_hot, oracle.rot_k) / oracle.scales for r in rows])
    assert np.allclose(plain[hot], want[hot], rtol=0, atol=4e-3 * np.abs(want).max())
    assert not np.allclose(turned[hot], want[hot], rtol=0, atol=0.1 * np.abs(want).max())
