"""How much of the waiting prompts goes into a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixedkv.engine.schedule.pacing import Pace, share

pytestmark = pytest.mark.full


@pytest.mark.parametrize("token_s", [0.0001, 0.001])
def test_the_slice_of_prompts_settles_where_steps_are_as_slow_as_they_may_be(token_s: float) -> None:
    pace = Pace(n_batch=512, slowdown=2.0)
    assert pace.budget(0) == 512
    slices = []
    for _ in range(1000):
        n = pace.budget(4)
        pace.observe(4, n, 0.010 + n * token_s)
        slices.append(n)
    expected = 0.010 / token_s
    settled = [n for n in slices[500:] if n]
    assert 0.7 * expected < sum(settled) / len(settled) < 1.2 * expected
    assert 0.01 < slices.count(0) / len(slices) < 0.05  # to know what a step takes without prompts


def test_prompts_always_get_on() -> None:
    pace = Pace(n_batch=512, slowdown=1.1)
    slices = []
    for _ in range(600):
        slices.append(n := pace.budget(4))
        pace.observe(4, n, 0.01 + n)
    assert sum(slices[-40:]) == 10  # one token in every fourth step


@given(st.integers(1, 600), st.lists(st.integers(1, 900), max_size=8))
def test_the_budget_is_shared_out(budget: int, remaining: list[int]) -> None:
    given_ = share(budget, remaining)
    assert sum(given_) == min(budget, sum(remaining))
    assert all(0 <= g <= r for g, r in zip(given_, remaining, strict=True))
    if remaining:
        assert given_[0] >= min(remaining[0], budget // 2)


def test_prompts_of_one_length_take_turns_and_short_ones_do_not_wait() -> None:
    assert share(100, [500, 500, 500]) == [100, 0, 0]
    assert share(100, [50, 500, 500]) == [50, 50, 0]
    assert share(100, [500, 900, 30]) == [70, 0, 30]
    assert share(100, [500, 80, 30]) == [50, 20, 30]


def test_more_streams_may_take_longer() -> None:
    """The measure is what a step takes without prompts for as many streams as there are now."""
    pace = Pace(n_batch=512, slowdown=2.0)
    for n_streams in [1] * 200 + [8] * 400:
        n = pace.budget(n_streams)
        pace.observe(n_streams, n, 0.001 * n_streams + n * 0.0001)
    assert 0.7 * 80 < sum(pace.budget(8) for _ in range(100)) / 100 < 1.2 * 80


def test_more_prompts_than_streams_get_more() -> None:
    """Whose first token does not come waits as well: three prompts beside a stream get thrice as much."""
    pace = Pace(n_batch=512, slowdown=2.0)
    slices: dict[int, list[int]] = {1: [], 3: []}
    for step in range(2000):
        n_prompts = 1 if step % 2 else 3
        slices[n_prompts].append(n := pace.budget(1, n_prompts))
        pace.observe(1, n, 0.010 + n * 0.001)
    settled = {n_prompts: np.median(given[500:]) for n_prompts, given in slices.items()}
    assert 2.5 < settled[3] / settled[1] < 3.5
