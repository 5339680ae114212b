"""How long tenants wait beside one that floods the engine, in simulated time: no other work counts."""

from __future__ import annotations

import pytest

from support.engine.simulated_tenants import FLOODS, N_HONEST, beside, percentile

pytestmark = pytest.mark.full

SECONDS = 20.0
MOST_TIMES = 3.0


@pytest.fixture(scope="module")
def alone() -> float:
    return percentile(beside("", SECONDS))


@pytest.mark.parametrize("flood", FLOODS)
def test_honest_tenants_wait_at_most_three_times_as_long(alone: float, flood: str) -> None:
    found = beside(flood, SECONDS)
    assert len(found) > 100
    assert percentile(found) <= MOST_TIMES * alone


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [2, 3, 4])
@pytest.mark.parametrize("flood", FLOODS)
def test_so_they_do_with_other_requests(flood: str, seed: int) -> None:
    assert percentile(beside(flood, 60.0, seed)) <= MOST_TIMES * percentile(beside("", 60.0, seed))


@pytest.mark.parametrize("n", [1, 4])
def test_nobody_is_starved(n: int) -> None:
    """The tenants that flood get answers too, since they have a turn like all others."""
    from support.engine.simulated_tenants import FLOOD, Client, Simulation, honest

    make, _ = FLOODS["prompts alone"]
    floods = [Client(f"mal{i % n}", make, lambda r: 0.02) for i in range(FLOOD)]
    Simulation([*(honest(f"t{i}") for i in range(N_HONEST)), *floods], SECONDS)
    assert sum(len(client.seconds) for client in floods) >= 5
