"""Every job ends in time, whoever comes and whatever is lost: random worlds without a model."""

from __future__ import annotations

import pytest

from support.random_queue import run_world


@pytest.mark.parametrize("first", range(0, 120, 30))
def test_every_job_of_a_random_world_ends(first: int) -> None:
    """40,000 steps; `support.random_queue` runs more."""
    for seed in range(first, first + 30):
        run_world(seed)
