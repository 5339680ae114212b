"""Decoding that stops half-way or does not start leaves a cache that is whole."""

from __future__ import annotations

import numpy as np
import pytest

from support.cache.checks import assert_same, check_books, check_rows
from support.cache.harness import Ctx, DecodeError, Mixed, prompt
from support.models import zoo

pytestmark = pytest.mark.core

KV = Mixed(threshold=24, group=8, sinks=3)
tokens = prompt(400, seed=12)


def test_a_batch_that_does_not_fit_changes_nothing(open_ctx, attention: str) -> None:
    kv = KV.with_(attention=attention)
    ctx, twin = (open_ctx("llama-64", kv, n_ctx=256) for _ in range(2))
    for side in (ctx, twin):
        side.decode(tokens[:250])
    before, stats = ctx.save(), ctx.stats()
    for n in (7, 100):
        with pytest.raises(DecodeError) as refused:
            ctx.decode(tokens[250 : 250 + n])
        assert refused.value.code == 1
    assert ctx.save() == before
    assert ctx.stats() == stats
    assert np.array_equal(ctx.decode(tokens[300:306]), twin.decode(tokens[300:306]))


def test_an_inconsistent_batch_changes_nothing(open_ctx, attention: str) -> None:
    """Positions that do not follow the sequence's last."""
    kv = KV.with_(attention=attention)
    ctx, twin = (open_ctx("llama-64", kv) for _ in range(2))
    for side in (ctx, twin):
        side.decode(tokens[:50])
    stats = ctx.stats()
    with pytest.raises(DecodeError) as refused:
        ctx.decode(tokens[:5], positions=10)
    assert refused.value.code == -1
    assert ctx.stats() == stats
    assert np.array_equal(ctx.decode(tokens[50:60]), twin.decode(tokens[50:60]))


def assert_untouched(ctx: Ctx, twin: Ctx) -> None:
    """To the bit what never tried: rows, ring slots, and what comes next."""
    assert ctx.sequences() == twin.sequences()
    assert ctx.save_seq() == twin.save_seq()
    for n in (1, 5, 40):  # a token, a draft, a slice of a prompt
        first = ctx.pos_max() + 1
        mine, theirs = (side.decode(tokens[300 : 300 + n], positions=first) for side in (ctx, twin))
        assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("n_calls", [0, 1, 10, 20, 30])
@pytest.mark.parametrize("n", [1, 20, 200])
def test_an_abort_costs_nothing(open_ctx, attention: str, n: int, n_calls: int) -> None:
    """The window of 64 is as it was, also where the first layers have replaced all of it."""
    kv = Mixed(threshold=64, group=16, sinks=3, attention=attention)
    ctx, twin = (open_ctx("llama-64", kv, n_ubatch=256) for _ in range(2))
    for side in (ctx, twin):
        side.decode(tokens[:100])
    before = ctx.rows(0, "k")[2].sum()
    ctx.abort_after(n_calls)
    with pytest.raises(DecodeError) as aborted:
        ctx.decode(tokens[100 : 100 + n])
    assert aborted.value.code == 2
    ctx.abort_after(None)
    assert ctx.rows(0, "k")[2].sum() == before
    assert_untouched(ctx, twin)


@pytest.mark.by_model
@pytest.mark.parametrize("name", ["llama-64", "gpt-oss"])
@pytest.mark.parametrize("n_calls", [0, 1, 40, 75, 100, 130])
def test_abort_in_the_middle(open_pair, attention: str, name: str, n_calls: int) -> None:
    """What was processed stays; what was under way is gone, and no row of it is ever read."""
    ctx, oracle = open_pair(name, zoo.SHAPES[name].kv_layers[-1], KV.with_(attention=attention), n_ubatch=16)
    assert_same(ctx, oracle, tokens[:40])
    ctx.abort_after(n_calls)
    with pytest.raises(DecodeError) as aborted:
        ctx.decode(tokens[40:140])
    assert aborted.value.code == 2
    ctx.abort_after(None)
    done = ctx.pos_max() + 1
    assert done < 140
    assert (done - 40) % 16 == 0
    check_books(ctx)
    oracle.decode(tokens[40:done]) if done > 40 else None
    check_rows(ctx, oracle)
    for i in range(3):
        assert_same(ctx, oracle, tokens[200 + 10 * i : 210 + 10 * i])
        check_books(ctx, oracle)
