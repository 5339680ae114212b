"""The statistics, against values from elsewhere or from the definition."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mixedkv_bench import quality
from mixedkv_bench.harness import sample_text, summary
from mixedkv_bench.harness.cache_settings import make_settings
from mixedkv_bench.harness.speed_run import SpeedWork
from mixedkv_bench.speed import Contender, Times, _rows

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_wilson(correct: int, n: int, low: float, high: float) -> None:
    """The last is the example of R. G. Newcombe, 1998, Statistics in Medicine 17:857."""
    assert summary.wilson(correct, n) == pytest.approx((low, high), abs=5e-4)


def test_standard_error_knows_that_neighbours_are_alike() -> None:
    independent = np.random.default_rng(1).standard_normal(32 * 400)
    alike = np.repeat(independent[:400], 32)
    assert summary.standard_error(independent) == pytest.approx(1 / math.sqrt(32 * 400), rel=0.15)
    assert summary.standard_error(alike) == pytest.approx(1 / math.sqrt(400), rel=0.15)


def test_divergence_by_its_definition() -> None:
    random = np.random.default_rng(2)
    a, b = (random.standard_normal((5, 7)).astype(np.float32) * 3 for _ in range(2))
    following = np.array([0, 1, 2, 3, 4], np.int32)
    kept = quality.compare(quality.Distributions.of(a), b, following)
    for i, row in enumerate(kept):
        p, q = (np.exp(x[i].astype(float)) / np.exp(x[i].astype(float)).sum() for x in (a, b))
        assert row[0] == pytest.approx(sum(p * np.log(p / q)), rel=1e-4)
        assert row[1:3] == pytest.approx([-math.log(p[i]), -math.log(q[i])], rel=1e-4)
        assert row[3] == (p.argmax() == q.argmax())
        assert row[4] == pytest.approx(q[i] - p[i], abs=1e-5)


@pytest.mark.parametrize("scale", [1e-5, 1e-3, 0.1, 2.0])
def test_small_divergences_of_a_large_vocabulary(scale: float) -> None:
    random = np.random.default_rng(3)
    a = random.standard_normal((4, 50_000)).astype(np.float32) * 3
    b = a + random.standard_normal(a.shape).astype(np.float32) * np.float32(scale)
    kept = quality.compare(quality.Distributions.of(a), b, np.zeros(4, np.int32))
    p, q = summary.log_softmax(a), summary.log_softmax(b)
    assert kept[:, 0] == pytest.approx((np.exp(p) * (p - q)).sum(axis=1), rel=1e-4)


def test_a_distribution_beyond_all_bounds_has_a_finite_divergence() -> None:
    want = quality.Distributions.of(np.array([[0.0, -200.0, 5.0]], np.float32))
    kept = quality.compare(want, np.array([[0.0, 300.0, 5.0]], np.float32), np.zeros(1, np.int32))
    assert np.isfinite(kept).all()


def test_logits_of_any_size_have_a_distribution() -> None:
    logits = np.array([[1e4, -1e4, 0.0]], np.float32)
    assert summary.log_softmax(logits)[0] == pytest.approx([0, -2e4, -1e4])


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that slows down during a run slows all settings alike."""
    f16, q4_0 = make_settings(["f16", "q4_0"], "on")
    slowing = [1.0, 2.0, 4.0]
    contenders = [
        Contender(f16, "mixedkv", times=[Times(t, t) for t in slowing]),
        Contender(q4_0, "mixedkv", times=[Times(2 * t, 0.5 * t) for t in slowing]),
    ]
    row = list(_rows(contenders, SpeedWork(depth=0, n_prompt=8, n_gen=4, threads=1)))[1]
    assert (row.pp_vs_f16, row.tg_vs_f16) == (0.5, 2.0)
    assert row.pp_samples == [4.0, 2.0, 1.0]


def count(text: str) -> int:
    return len(text.split())


def test_the_sample_is_the_same_every_time() -> None:
    text = sample_text.document(3, 500, count)
    assert text == sample_text.document(3, 500, count) != sample_text.document(4, 500, count)
    assert count(text) >= 400


def test_a_journal_has_its_facts_where_it_says() -> None:
    journal = sample_text.journal(5, 900, 2, count)
    assert len(journal.questions) == len(sample_text.DEPTHS) * 2 * 2
    for question in journal.questions:
        assert journal.sentences[question.at] == question.fact.statement
        assert journal.sentences.count(question.fact.statement) == 1
        share = count(" ".join(journal.sentences[: question.at])) / count(journal.text)
        assert share == pytest.approx(sample_text.DEPTHS[question.slot], abs=0.12)
    assert len({question.fact.question for question in journal.questions}) == len(journal.questions)


def test_rivals_share_a_name_or_an_object() -> None:
    journal = sample_text.journal(6, 900, 2, count)
    for question in journal.questions:
        if question.variant == "rivals":
            words = set(question.fact.question.replace("'s", "").replace("?", "").split())
            for other in journal.sentences[question.at + 1 : question.at + 4]:
                assert len(words & set(other.replace("'s", "").split())) >= 1
