"""What exact means: the same tokens, types and window rule, and every row computed from computed rows.

Whatever was done to them, such rows are those of a fresh context, and so is what is answered after them: to
the bit where this cache attends, and but for rounding where llama.cpp does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.cache.random_rows import Sizes, Subject, Tally
from support.cache.same_bits import has_same_bits

pytestmark = pytest.mark.full

MODELS = ("llama-64", "gemma2", "gemma4", "gpt-oss")  # plain, sliding windows of three kinds
SAME_BITS = (0.0, 0.0)
# The relative error of a row, and the difference of a log-probability of a token that has 1% or more. An
# element of a row, or of what weights are multiplied with, moves to its next level where other batches or
# cells round otherwise. Rows of other tokens, or computed behind others, are off by 1.4, and
# answers after them by 14.
ROUNDING = (0.1, 1.0)
KINDS = (
    "f16",
    "q8_0",
    "q8_0:attention=fused",
    "mixed:threshold=0,sinks=0,cold=q8_0",
    "mixed:threshold=16,group=8,sinks=4",
)


def bounds_of(path: Path, kv: str) -> tuple[float, float]:
    """Return what a row and an answer may be off by."""
    return SAME_BITS if has_same_bits(path, kv) else ROUNDING


def play(
    path: Path,
    kv: str,
    *,
    swa_full: bool,
    n_seq: int,
    unified: bool,
    seed: int,
    n: int,
    sizes: Sizes = Sizes(),  # noqa: B008
    bounds: tuple[float, float] | None = None,
) -> Tally:
    """Do `n` things at random; what is wrong fails with the thing that made it so."""
    row, answer = bounds or bounds_of(path, kv)
    subject = Subject(path, kv, swa_full=swa_full, n_seq=n_seq, unified=unified, seed=seed, sizes=sizes)
    try:
        for i in range(n):
            done, tally = subject.step(), subject.tally
            assert not tally.wrong, (i, done)
            assert tally.row <= row, (i, done)
            assert tally.answer <= answer, (i, done)
    finally:
        subject.close()
    return subject.tally


LAYOUTS = ((2, True), (4, True), (8, True), (3, False))  # sequences, and whether they share cells


@pytest.mark.by_model
@pytest.mark.parametrize("swa_full", [True, False])
@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_rows_that_are_vouched_for_are_those_of_a_fresh_context(
    name: str, kv: str, swa_full: bool, zoo_q4_1_path: Callable[[str], Path]
) -> None:
    tally = play(zoo_q4_1_path(name), kv, swa_full=swa_full, n_seq=3, unified=True, seed=1, n=80)
    assert tally.n_rows > 500
    assert tally.n_answers >= 5


@pytest.mark.parametrize("cold", ["q5_0", "lm4", "tc3"])
def test_rows_of_other_types_have_their_bits_too(cold: str, zoo_q4_1_path: Callable[[str], Path]) -> None:
    kv, path = f"mixed:threshold=16,group=8,sinks=4,cold={cold}", zoo_q4_1_path("gemma2")
    assert play(path, kv, swa_full=False, n_seq=3, unified=True, seed=1, n=80).n_rows > 500


@pytest.mark.nightly
@pytest.mark.parametrize("kv", KINDS)
def test_twenty_thousand_operations(kv: str, zoo_q4_1_path: Callable[[str], Path]) -> None:
    """20,480 operations for each kind of cache, of which some 3,000 are answers that are vouched for. The
    engine gives 5,000 in `engine/test_prefixes_at_random_cuts.py`. Two minutes of an idle core.
    """
    n_answers = 0
    for seed, (n_seq, unified) in enumerate(LAYOUTS):
        for name in MODELS:
            for swa_full in (True, False):
                path = zoo_q4_1_path(name)
                tally = play(path, kv, swa_full=swa_full, n_seq=n_seq, unified=unified, seed=seed, n=640)
                n_answers += tally.n_answers
    assert n_answers > 2000


@pytest.mark.needs("real model")
@pytest.mark.nightly
@pytest.mark.parametrize("swa_full", [True, False])
@pytest.mark.parametrize("kv", ["f16", "q8_0", "q8_0:attention=fused", "mixed"])
def test_prompts_longer_than_the_window_of_a_real_model(
    kv: str, swa_full: bool, real_model_gemma_q4: Path
) -> None:
    """Where llama.cpp attends, or multiplies single columns of Q5_K and Q6_K, rows of random
    tokens grow apart without a limit from layer to layer, for no other reason than the cells they are in:
    the first four layers are compared. Rows that lack some of what they attended to are off by more.
    """
    same = has_same_bits(real_model_gemma_q4, kv)
    sizes = Sizes(n_ctx=2048, most=1000, longest=600, n_batch=256, layers=None if same else 4)
    tally = play(
        real_model_gemma_q4,
        kv,
        swa_full=swa_full,
        n_seq=2,
        unified=True,
        seed=1,
        n=40,
        sizes=sizes,
        bounds=SAME_BITS if same else (0.3, 1.5),
    )
    print(tally)
    assert tally.n_rows > 5000
    assert tally.n_answers >= 2
