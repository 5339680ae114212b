"""Answers at temperature 0 are those of a server that reuses nothing, or their label says why not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.mixed_requests import Mix

N = int(os.environ.get("MIXEDKV_TEST_MIXED_REQUESTS", "12"))


@pytest.mark.slow
def test_two_servers_on_one_store(real_model_q4_1: Path, tmp_path: Path) -> None:
    mix = Mix(real_model_q4_1, tmp_path, seed=1, embeddings=False)
    try:
        outcome = mix.run(N)
    finally:
        mix.close()
    assert sum(outcome.counts.values()) >= N
    differing = [found for found in outcome.differing if found["verdict"] == "differs"]
    assert len(differing) <= N // 10, differing
