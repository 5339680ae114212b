"""Invariant 4: how a prompt is cut into batches changes logits by rounding only."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from support.cache.checks import TOL_FUSED, tolerance, worst
from support.cache.harness import Ctx, Mixed, Uniform, prompt, rel_rms
from support.models import zoo

pytestmark = [pytest.mark.core, pytest.mark.by_model]

N = 200
WINDOW = Mixed(threshold=48, group=16, sinks=4)
UBATCHES = (1, 7, 64, 512)


def logits(open_, n_ubatch: int) -> np.ndarray:
    ctx = open_(n_ubatch)
    return ctx.decode(prompt(N), logits_at=range(0, N, 5))


def spread(open_, kv: Uniform | Mixed) -> float:
    """How far the logits move, at most, between the ways of cutting."""
    got = [logits(lambda n: open_(kv, n), n) for n in UBATCHES]
    return max(rel_rms(other, got[-1]) for other in got[:-1])


@pytest.mark.parametrize("name", zoo.SUPPORTED)
def test_micro_batches_of_one_layer(open_pair, name: str, attention: str) -> None:
    """A muted model: rows do not depend on rounding, so neither path may show more than llama.cpp's own
    attention does on F16 rows.
    """
    il = zoo.SHAPES[name].kv_layers[-1]

    def open_(kv: Uniform | Mixed, n_ubatch: int) -> Ctx:
        return open_pair(name, il, kv, n_ubatch=n_ubatch)[0]

    assert spread(open_, WINDOW.with_(attention=attention)) < max(2 * spread(open_, Uniform()), TOL_FUSED)


@pytest.mark.parametrize("name", zoo.SUPPORTED)
def test_micro_batches_of_a_whole_model(open_ctx, name: str, attention: str) -> None:
    """Whole models carry rounding on into rows that later layers quantise, where it can move an element a
    step: little beside what quantisation itself does.
    """

    def open_(kv: Uniform | Mixed, n_ubatch: int) -> Ctx:
        return open_ctx(name, kv, n_ubatch=n_ubatch)

    f16, q4 = (logits(lambda n, kv=kv: open_(kv, n), 64) for kv in (Uniform(), Uniform(k="q4_0", v="q4_0")))
    assert spread(open_, WINDOW.with_(attention=attention)) < rel_rms(q4, f16) / 10


def test_micro_batches_of_layers_of_several_types(open_ctx, attention: str) -> None:
    kv = WINDOW.with_(layers=((1, -1, "q8_0", "q5_0"),), attention=attention)
    f16, q4 = (
        logits(lambda n, kv=kv: open_ctx("llama-64", kv, n_ubatch=n), 64) for kv in (Uniform(), WINDOW)
    )
    assert spread(lambda kv, n: open_ctx("llama-64", kv, n_ubatch=n), kv) < rel_rms(q4, f16) / 10


def test_several_calls_are_one_prompt(open_pair, attention: str) -> None:
    """Batches handed over in pieces, as a chat does, are the same prompt."""
    kv = WINDOW.with_(attention=attention)
    whole, _ = open_pair("llama-64", 1, kv, n_ubatch=64)
    parts, _ = open_pair("llama-64", 1, kv, n_ubatch=64)
    tokens = prompt(N)
    want = whole.decode(tokens)
    cuts = [0, 3, 50, 51, 52, 117, 118, N]
    got = np.concatenate([parts.decode(tokens[a:b]) for a, b in pairwise(cuts)])
    assert worst(got, want) < tolerance(kv)
    assert parts.rows(1, "k")[2].tolist() == whole.rows(1, "k")[2].tolist()
