"""Operations crossed with each other on every family of the zoo, and with faults in the middle of them.

After each step rows of logits are those of an independent context that did the same alone, and what
`exact_tokens` vouches for is what a fresh evaluation gives. MIXEDKV_TEST_CROSSING_SECONDS=3600 runs random
plans for so long, and MIXEDKV_TEST_ABORTS=10000 lets so many steps fail; a plan that finds something is
printed as short as it gets.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from support.cache.crossing.aborts import run as run_aborts
from support.cache.crossing.aborts import setups as abort_setups
from support.cache.crossing.crossing_run import again, explore, setups
from support.cache.crossing.subject import Setup, model_file
from support.cache.crossing.witnesses import WITNESSES

pytestmark = pytest.mark.full

LONG = float(os.environ.get("MIXEDKV_TEST_CROSSING_SECONDS", "0"))
ABORTS = list(abort_setups())[::3]
N_ABORTS = max(12, int(os.environ.get("MIXEDKV_TEST_ABORTS", "0")) // len(ABORTS))
SETUPS = list(setups())
SOME = SETUPS if LONG else SETUPS[:: max(1, len(SETUPS) // 24)]


@pytest.fixture(scope="session")
def family(zoo_dir: Path) -> Callable[[str], Path]:
    return lambda name: model_file(name, zoo_dir)


@pytest.mark.parametrize("name", WITNESSES)
def test_a_fault_that_was_there(name: str, family: Callable[[str], Path]) -> None:
    setup, plan = WITNESSES[name]
    assert not again(setup, family(setup.family), plan)


@pytest.mark.parametrize("setup", SOME, ids=str)
def test_random_plans(setup: Setup, family: Callable[[str], Path]) -> None:
    tally = explore(setup, family(setup.family), LONG / len(SOME), seed=0, signals=LONG > 0)
    assert not tally.findings, "\n".join(map(str, tally.findings))
    assert tally.n_compared


@pytest.mark.parametrize("setup", ABORTS, ids=str)
def test_steps_that_fail_leave_nothing(setup: Setup, family: Callable[[str], Path]) -> None:
    counts, found = run_aborts(setup, family(setup.family), N_ABORTS, seed=0)
    assert not found
    assert sum(counts.values()) >= N_ABORTS
