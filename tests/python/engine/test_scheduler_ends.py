"""Every job ends in time, whoever comes and whatever is lost: random worlds without a model."""

from __future__ import annotations

import pytest

from support.engine.random_queue import run_world

pytestmark = pytest.mark.full


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in (30, 60, 90))])
def test_every_job_of_a_random_world_ends(first: int) -> None:
    """10,000 steps, in `nightly` 40,000."""
    for seed in range(first, first + 30):
        run_world(seed)
