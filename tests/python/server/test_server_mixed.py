"""Answers at temperature 0 are those of a server that reuses nothing, or their label says why not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.mixed_requests import Mix

pytestmark = pytest.mark.nightly

N = int(os.environ.get("MIXEDKV_TEST_MIXED_REQUESTS", "12"))


@pytest.mark.slow
@pytest.mark.parametrize(("kv", "bound"), [("f16", 0.05), ("mixed", 0.1)])
def test_two_servers_on_one_store(real_model: Path, tmp_path: Path, kv: str, bound: float) -> None:
    """With F16 weights: rounding to four or eight bits makes more of sums in another order."""
    mix = Mix(real_model, tmp_path, seed=1, kv=kv, embeddings=False, bound=bound)
    try:
        outcome = mix.run(N)
    finally:
        mix.close()
    assert sum(outcome.counts.values()) >= N
    assert len(outcome.far) > N // 2
    assert not [found for found in outcome.parted if found["verdict"] == "differs"]
