"""Values in bases of their own, and lm3, which stores them: by the oracle, out of the cache and back."""

from __future__ import annotations

import numpy as np
import pytest

from support.checks import check_books, check_rows, tolerance, worst
from support.harness import Mixed, Uniform, prompt, rel_rms

KV = Mixed(k="lm4", v="lm3", threshold=24, group=8, sinks=3, bases=1)
tokens = prompt(200, seed=6)


@pytest.mark.parametrize(
    ("name", "v", "threshold"),
    [("llama-64", "lm3", 12), ("llama-64", "lm3", 0), ("llama-64", "q8_0", 12), ("llama-128", "lm3", 12)],
)
def test_every_pair_uses_the_right_row(open_pair, name: str, v: str, threshold: int, attention: str) -> None:
    """Window, batches and single tokens: the oracle stores values in the same basis."""
    kv = KV.with_(v=v, threshold=threshold, group=4, sinks=2, attention=attention)
    ctx, oracle = open_pair(name, 0, kv, n_ubatch=16)
    got = [ctx.decode(tokens[:44])] + [ctx.decode([token]) for token in tokens[44:56]]
    assert worst(np.concatenate(got), oracle.decode(tokens[:56])) < tolerance(kv)
    check_books(ctx, oracle)
    check_rows(ctx, oracle)


def test_shift_rollback_and_copy(open_pair, attention: str) -> None:
    kv = KV.with_(attention=attention)
    ctx, oracle = open_pair("llama-64", 1, kv, n_seq_max=2, unified=True)
    for each in (ctx, oracle):
        each.decode(tokens[:60])
        each.cp(0, 1, 0, 40)
        each.rm(0, 50)
        each.rm(0, 10, 20)
        each.add(0, 20, 50, -10)
    for seq, first in ((0, 60), (1, 80)):
        part = tokens[first : first + 12]
        assert worst(ctx.decode(part, seq_ids=seq), oracle.decode(part, seq_ids=seq)) < 2 * tolerance(kv)
    check_books(ctx, oracle)


def test_a_basis_changes_rounding_only(open_ctx, attention: str) -> None:
    """What is stored nearly exactly is, in any basis, what the model computed."""
    kv = KV.with_(k="q8_0", v="q8_0", attention=attention)
    want = open_ctx("llama-64", Uniform()).decode(tokens[:80])
    plain, based = (open_ctx("llama-64", each).decode(tokens[:80]) for each in (kv.with_(bases=None), kv))
    assert 0 < rel_rms(based, want) < 3 * rel_rms(plain, want)
    ctx = open_ctx("llama-64", kv)
    ctx.decode(tokens[:80])
    exact = open_ctx("llama-64", Uniform())
    exact.decode(tokens[:80])
    assert rel_rms(ctx.rows(0, "v", unrotate=True)[0], exact.rows(0, "v", unrotate=True)[0]) < 0.02


@pytest.mark.parametrize("n_ubatch", [1, 7])
def test_batches_change_rounding_only(open_ctx, n_ubatch: int, attention: str) -> None:
    kv = KV.with_(attention=attention)
    f16, whole = (open_ctx("llama-64", each).decode(tokens) for each in (Uniform(), kv))
    cut = open_ctx("llama-64", kv, n_ubatch=n_ubatch).decode(tokens)
    assert rel_rms(cut, whole) < rel_rms(whole, f16) / 10


def test_bit_identical_to_never_having_left(open_ctx, attention: str) -> None:
    """By a state, by a block, and by blocks of turns."""
    kv = KV.with_(attention=attention)
    stayed, state, block, turns = (open_ctx("llama-64", kv) for _ in range(4))
    stayed.decode(tokens[:40])
    first = stayed.export(0, 0, 40)
    stayed.decode(tokens[40:70])
    assert state.load(stayed.save())
    block.put(stayed.export())
    turns.put(first)
    turns.put(stayed.export(0, 40))
    for i in range(3):
        part = tokens[70 + 10 * i : 80 + 10 * i]
        want = stayed.decode(part)
        for away in (state, block, turns):
            assert np.array_equal(away.decode(part), want)


def test_a_block_cut_short_is_a_rollback(open_ctx) -> None:
    stayed, away = (open_ctx("llama-64", KV.with_(draft=0)) for _ in range(2))
    stayed.decode(tokens[:70])
    away.put(stayed.export(0, 0, 33))
    assert stayed.rm(0, 33)
    assert np.array_equal(away.decode(tokens[33:60]), stayed.decode(tokens[33:60]))


def test_another_basis_is_refused(open_ctx) -> None:
    one, other = (open_ctx("llama-64", KV.with_(bases=seed)) for seed in (1, 2))
    one.decode(tokens[:40])
    with pytest.raises(ValueError, match="in a basis that the cache does not have"):
        other.put(one.export())
    with pytest.raises(ValueError, match="in a basis that the cache does not have"):
        open_ctx("llama-64", KV.with_(v="q8_0", bases=None)).put(one.export())
    assert not other.load(one.save())


@pytest.mark.parametrize("equalize", [True, False])
def test_rows_of_other_caches_get_the_basis(open_ctx, equalize: bool) -> None:
    for kv in (Uniform(), Mixed(k="q8_0", v="q8_0", equalize=equalize)):
        source, target = open_ctx("llama-64", kv), open_ctx("llama-64", KV.with_(v="q8_0", equalize=equalize))
        source.decode(tokens[:70])
        target.put(source.export())
        want, have = (ctx.rows(1, "v", unrotate=True)[0] for ctx in (source, target))
        assert rel_rms(have, want) < 0.03


@pytest.mark.parametrize(
    ("kv", "message"),
    [
        (KV.with_(bases=None), "'lm3' needs a basis for the values of layer 0"),
        (KV.with_(k="lm3"), "'lm3' is a type of values alone: use lm4"),
        (Uniform(v="lm3"), None),
    ],
    ids=["no basis", "keys", "uniform"],
)
def test_refused(open_ctx, kv: Mixed | Uniform, message: str | None) -> None:
    with pytest.raises(RuntimeError, match=message):
        open_ctx("llama-64", kv)
