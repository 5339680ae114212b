"""Threads that prepare requests: tenants take turns, and none has all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from mixedkv.work.fair_pool import FairPool
from mixedkv.work.presence import presence
from mixedkv.work.turns import TenantLimits
from mixedkv_server.pools import Pools
from support.patience import PATIENCE, wait_for

pytestmark = pytest.mark.full


@pytest.fixture
def pools() -> Iterator[Pools]:
    with Pools() as pools:
        yield pools


def test_one_tenants_work_leaves_a_thread_to_others(pools: Pools) -> None:
    release = threading.Event()
    try:
        held = [pools.prompts.submit("a", release.wait, PATIENCE) for _ in range(50)]
        assert pools.prompts.submit("b", lambda: "answered").result(PATIENCE) == "answered"
    finally:
        release.set()
    assert all(each.result(PATIENCE) for each in held)


def test_large_prompts_hold_no_small_one_up(pools: Pools) -> None:
    release = threading.Event()
    try:
        held = pools.large_prompts.submit("a", release.wait, PATIENCE)
        assert pools.prompts.submit("a", lambda: "answered").result(PATIENCE) == "answered"
    finally:
        release.set()
    assert held.result(PATIENCE)


@pytest.mark.parametrize("weight", [1, 3])
def test_tenants_take_turns_by_weight(weight: int) -> None:
    """The time of a processor that each piece takes is about the same."""
    pool = FairPool(1, "test", lambda tenant: TenantLimits(weight=weight if tenant == "b" else 1))
    release, order = threading.Event(), list[str]()

    def work(tenant: str) -> None:
        order.append(tenant)
        end = time.perf_counter() + 0.01
        while time.perf_counter() < end:
            pass

    held = pool.submit("first", release.wait, PATIENCE)
    futures: list[Future[Any]] = [pool.submit("a", work, "a") for _ in range(60)]
    futures += [pool.submit("b", work, "b") for _ in range(20)]
    release.set()
    for future in [held, *futures]:
        future.result(PATIENCE)
    pool.close()
    last = max(i for i, tenant in enumerate(order) if tenant == "b")
    assert order[:last].count("a") <= 20 * 2 / weight, "it waits for its share only, not for all 60"


def test_what_fails_fails_alone_and_the_end_cancels_what_waits() -> None:
    pool, release, began = (
        FairPool(1, "test", lambda tenant: TenantLimits()),
        threading.Event(),
        threading.Event(),
    )
    with pytest.raises(ZeroDivisionError):
        pool.submit("a", lambda: 1 // 0).result(PATIENCE)

    def hold() -> str:
        began.set()
        release.wait(PATIENCE)
        return "done"

    held, waiting = pool.submit("a", hold), pool.submit("a", hold)
    assert began.wait(PATIENCE)
    closing = threading.Thread(target=pool.close)
    closing.start()
    wait_for(waiting.cancelled)
    release.set()
    closing.join(PATIENCE)
    assert held.result(PATIENCE) == "done"
    with pytest.raises(CancelledError):
        waiting.result(PATIENCE)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit("a", hold)


@pytest.mark.parametrize("beside", [False, True])
def test_a_flood_of_work_rests_while_others_have_requests(beside: bool) -> None:
    """A tenant's tasks of 10 ms take a third of the time at most beside another tenant, all of it alone."""
    pool = FairPool(1, "test", lambda tenant: TenantLimits(), rest=2.0)
    with presence.of("flood"), presence.of("other" if beside else "flood"):
        began = time.perf_counter()
        held = [pool.submit("flood", time.sleep, 0.01) for _ in range(20)]
        if beside:  # it waits for nobody's rest
            assert pool.submit("other", time.perf_counter).result(PATIENCE) < began + 20 * 0.03
        for each in held:
            each.result(PATIENCE)
        seconds = time.perf_counter() - began
    pool.close()
    assert seconds >= 20 * 0.01 + (19 * 0.02 if beside else 0)
    if not beside:
        assert not pool._rests_until


def test_presence_counts_requests_by_tenant() -> None:
    assert not presence.has_others("a")
    with presence.of("a"), presence.of("a"):
        assert not presence.has_others("a")
        assert presence.has_others("b")
        with presence.of("b"):
            assert presence.has_others("a")
        assert not presence.has_others("a")
    assert not presence.has_others("b")
