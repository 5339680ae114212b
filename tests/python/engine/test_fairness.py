"""Tenants share places, prompt tokens and cells by their weights: counted in steps and tokens."""

from __future__ import annotations

from collections import Counter

import pytest

from mixedkv.engine.schedule.progress import Progress
from mixedkv.work.turns import Limits, TenantLimits
from support.engine.scheduler import N_BATCH, Desk

pytestmark = pytest.mark.full

ENDLESS = 1_000_000


def of(**limits: TenantLimits) -> Limits:
    return lambda tenant: limits.get(tenant, TenantLimits())


def endless(desk: Desk, tenant: str, n: int = 1, n_prompt: int = 20) -> list[Progress]:
    """Answers that never end, to prompts that have nothing in common with others."""
    first = 1000 * (ord(tenant[0]) + 100 * int(tenant[1:] or 0))
    prompts = [range(first + 100_000 * i, first + 100_000 * i + n_prompt) for i in range(n)]
    return desk.add(*prompts, tenant=tenant, max_tokens=ENDLESS)


def answered(desk: Desk, jobs: list[Progress], steps: int) -> Counter[str]:
    """Tokens of answers in so many steps, by tenant."""
    before = [job.n_answer for job in jobs]
    for _ in range(steps):
        desk.step()
    n: Counter[str] = Counter()
    for job, old in zip(jobs, before, strict=True):
        n[job.tenant] += job.n_answer - old
    return n


def steps_to_first_token(desk: Desk, job: Progress) -> int:
    steps = 0
    while job.n_answer == 0:
        desk.step()
        steps += 1
    return steps


def places(desk: Desk) -> Counter[str]:
    return Counter(job.tenant for job in desk.scheduler.running)


def test_64_endless_answers_make_room_for_another_tenants_one() -> None:
    desk = Desk(parallel=8, idle=8, n_ctx=100_000)
    many = endless(desk, "a", 64)
    answered(desk, many, 50)
    (one,) = endless(desk, "b")
    desk.step()
    assert places(desk) == {"a": 7, "b": 1}
    assert steps_to_first_token(desk, one) <= 4
    n = answered(desk, [*many, one], 300)
    assert n == {"a": 300 * 7, "b": 300}  # who has one answer gets a token of it in every step


def test_a_paused_answer_goes_on_from_its_rows() -> None:
    desk = Desk(parallel=2, idle=2, n_ctx=10_000)
    jobs = endless(desk, "a", 2, n_prompt=200)
    answered(desk, jobs, 40)
    (other,) = desk.add(range(900, 930), tenant="b")
    n_before = desk.cells.n_evaluated
    desk.finish_one(other)
    assert desk.log.seen["paused"] == 1
    n = sum(answered(desk, jobs, 40).values())
    assert n == 80
    assert desk.cells.n_evaluated - n_before < 30 + 2 * 8 + 80 + 40
    assert [job.work.exact for job in jobs] == [True, True]


@pytest.mark.parametrize("reuse", [True, False])
def test_who_shares_nothing_with_others_still_keeps_its_own_rows(reuse: bool) -> None:
    desk = Desk(parallel=1, idle=1, n_ctx=10_000)
    (a,) = desk.add(range(300), tenant="a", reuse=reuse, max_tokens=ENDLESS)
    answered(desk, [a], 100)
    endless(desk, "b")
    answered(desk, [a], 400)
    assert desk.log.seen["paused"] >= 4
    assert desk.cells.n_evaluated < 300 + 20 + 2 * 500


@pytest.mark.parametrize("parallel", [1, 2, 3, 4, 8])
def test_weights_of_1_and_3_give_tokens_by_1_and_3(parallel: int) -> None:
    desk = Desk(parallel=parallel, idle=8, n_ctx=200_000, limits=of(b=TenantLimits(weight=3)))
    jobs = [*endless(desk, "a", 16), *endless(desk, "b", 16)]
    answered(desk, jobs, 100)
    n = answered(desk, jobs, 2000)
    assert n["b"] / n["a"] == pytest.approx(3, rel=0.1)
    assert n.total() > 0.95 * 2000 * parallel  # nothing is lost by turns


@pytest.mark.parametrize(("parallel", "tenants"), [(8, 3), (4, 9), (1, 5), (2, 3)])
def test_tenants_of_one_weight_get_the_same(parallel: int, tenants: int) -> None:
    desk = Desk(parallel=parallel, idle=8, n_ctx=400_000)
    jobs = [job for i in range(tenants) for job in endless(desk, f"a{i}", 10)]
    answered(desk, jobs, 300)
    n = answered(desk, jobs, 3000)
    assert len(n) == tenants
    assert max(n.values()) < 1.1 * min(n.values())


def test_short_answers_share_by_weight_too() -> None:
    """Places fall free by themselves here: nobody has to be paused for this."""
    desk = Desk(parallel=4, idle=4, n_ctx=100_000, limits=of(b=TenantLimits(weight=3)))
    n_tokens: Counter[str] = Counter()
    jobs: list[Progress] = []
    for step in range(1200):
        for tenant in "ab":
            while sum(job.tenant == tenant for job in desk.scheduler.waiting) < 8:
                first = 100 * step + 50 * ord(tenant)
                prompt, n = range(first, first + 4), 5 + (len(jobs) + 1) % 7
                jobs += desk.add(prompt, tenant=tenant, reuse=False, max_tokens=n)
        desk.step()
    for job in jobs:
        n_tokens[job.tenant] += job.n_answer
    assert n_tokens["b"] / n_tokens["a"] == pytest.approx(3, rel=0.1)


def test_who_had_nothing_to_do_has_nothing_coming_to_it() -> None:
    """A tenant that let others work for long does not shut them out when it comes back."""
    desk = Desk(parallel=4, idle=4, n_ctx=200_000)
    first = endless(desk, "a", 8)
    (single,) = endless(desk, "b")
    answered(desk, [*first, single], 2000)  # b used a quarter
    prompts = (range(7000 * i, 7000 * i + 20) for i in range(1, 9))
    later = desk.add(*prompts, tenant="b", max_tokens=ENDLESS)
    n = answered(desk, [*first, *later, single], 100)
    assert n["a"] >= 0.4 * n.total()


def test_a_tenant_alone_has_everything() -> None:
    desk = Desk(parallel=4, idle=4, n_ctx=100_000)
    many = endless(desk, "a", 8)
    (one,) = endless(desk, "b")
    answered(desk, [*many, one], 20)
    assert places(desk) == {"a": 3, "b": 1}
    one.cancelled = True
    desk.step()
    assert places(desk) == {"a": 4}


def test_prompts_of_two_tenants_are_evaluated_by_turns() -> None:
    """Many long prompts of one tenant do not hold up the other's."""
    desk = Desk(parallel=8, idle=8, n_ctx=100_000)
    desk.add(*(range(5000 * i, 5000 * i + 4000) for i in range(1, 8)), tenant="a")
    for _ in range(10):
        desk.step()
    (one,) = desk.add(range(640), tenant="b")
    assert steps_to_first_token(desk, one) <= 2 * 640 // N_BATCH + 3


def test_prompts_are_shared_by_weight() -> None:
    desk = Desk(parallel=4, idle=4, n_ctx=400_000, limits=of(b=TenantLimits(weight=3)))
    jobs = [endless(desk, name, 1, n_prompt=90_000)[0] for name in "ab"]
    for _ in range(400):
        desk.step()
    a, b = (job.n_rows for job in jobs)
    assert b / a == pytest.approx(3, rel=0.1)


def test_one_tenants_rows_make_room_for_anothers_prompt() -> None:
    """Every cell is in answers of one tenant, which end long after."""
    desk = Desk(parallel=4, idle=4, n_ctx=1280)
    many = endless(desk, "a", 4, n_prompt=200)
    for job in many:
        steps_to_first_token(desk, job)
    assert 1280 - desk.cells.used < 200
    (one,) = endless(desk, "b", n_prompt=200)
    desk.step()
    assert places(desk) == {"a": 3, "b": 1}
    assert steps_to_first_token(desk, one) < 200  # what the pace takes for a prompt of that length


def test_when_cells_run_out_the_tenant_that_holds_the_most_gives_way() -> None:
    desk = Desk(parallel=4, idle=4, n_ctx=1024)
    many = endless(desk, "a", 3, n_prompt=100)
    answered(desk, many, 20)
    (one,) = endless(desk, "b", n_prompt=50)
    steps_to_first_token(desk, one)
    n = answered(desk, [*many, one], 300)
    assert desk.log.seen["preempted"] > 0
    assert n["b"] == 300


def test_no_more_places_than_a_tenant_may_have() -> None:
    desk = Desk(parallel=4, idle=4, n_ctx=100_000, limits=of(a=TenantLimits(running=2)))
    jobs = endless(desk, "a", 8)
    answered(desk, jobs, 30)
    assert places(desk) == {"a": 2}
    jobs += endless(desk, "b", 8)
    answered(desk, jobs, 200)
    assert places(desk) == {"a": 2, "b": 2}
    jobs += endless(desk, "c", 8)
    n = answered(desk, jobs, 2000)
    assert max(n.values()) < 1.15 * min(n.values())


def test_everybody_ends_whoever_pauses() -> None:
    """Five tenants, few places, few cells: all jobs end, and no row is left running."""
    desk = Desk(parallel=2, idle=2, n_ctx=512)
    jobs: list[Progress] = []
    for i in range(30):
        prompt = range(1000 * i, 1000 * i + 20 + 7 * i)
        jobs += desk.add(prompt, tenant=f"a{i % 5}", max_tokens=10 + 13 * i % 90)
        desk.step()
        if i % 7 == 3:
            jobs[-2].cancelled = True
    desk.finish(20_000)
    assert all(job.cancelled or job.n_answer == job.request.max_tokens for job in jobs)
    assert not any(seq.running or seq.paused for seq in desk.pool.held())


def test_two_prompts_that_do_not_fit_together_are_answered_one_after_the_other() -> None:
    """The second comes while the first is evaluated, and is shorter: it may go first, and that is decided
    once.
    """
    desk = Desk(parallel=4, idle=4, n_ctx=2048)
    (first,) = desk.add(range(1300), tenant="a", max_tokens=4)
    desk.step()
    (second,) = desk.add(range(5000, 6250), tenant="b", max_tokens=4)
    desk.log.most_paused = 1
    desk.finish(100)
    assert [job.n_answer for job in (first, second)] == [4, 4]
    assert desk.cells.n_evaluated < 1300 + 1250 + 2 * 8 + 1300


def test_a_place_is_not_taken_where_that_takes_the_rows_too() -> None:
    """Turns would undo each other's work: neither prompt is evaluated within a turn of 16 steps."""
    desk = Desk(parallel=1, idle=1, n_ctx=8192)
    (first,) = desk.add(range(5000), tenant="a", max_tokens=4)
    desk.step()
    (second,) = desk.add(range(10_000, 15_000), tenant="b", max_tokens=4)
    desk.finish(200)
    assert [job.n_answer for job in (first, second)] == [4, 4]
    assert desk.cells.n_evaluated < 2 * 5000 + 2 * 8


def test_who_lost_rows_keeps_its_place_until_they_were_of_use() -> None:
    desk = Desk(parallel=2, idle=1, n_ctx=512)
    (long,) = desk.add(range(320), tenant="a", max_tokens=ENDLESS)
    steps_to_first_token(desk, long)
    (short,) = desk.add(range(1000, 1240), tenant="b", max_tokens=8)
    desk.finish_one(short)
    assert desk.log.seen["paused"] == 1
    before = long.n_answer
    desk.step()
    assert long.holds_place
    shorts = desk.add(*(range(2000 + 1000 * i, 2240 + 1000 * i) for i in range(4)), tenant="b")
    while long.holds_place:
        desk.step()
        assert long in desk.scheduler.running
    assert long.n_answer - before >= 5  # a token for every 64 rows
    for short in shorts:
        desk.finish_one(short)


def test_who_fits_passes_a_prompt_that_has_no_room() -> None:
    """Two prompts of two tenants do not fit together; a third tenant's short one fits beside either."""
    desk = Desk(parallel=4, idle=4, n_ctx=2048)
    (first,) = desk.add(range(1300), tenant="a", max_tokens=300)
    steps_to_first_token(desk, first)
    (second,) = desk.add(range(5000, 6300), tenant="b", max_tokens=4)
    desk.step()
    assert places(desk) == {"a": 1}
    (short,) = desk.add(range(9000, 9040), tenant="c", max_tokens=8)
    assert steps_to_first_token(desk, short) <= 4
    assert second.n_rows == 0
    desk.finish_one(second)


def test_those_that_pass_leave_room_for_whose_turn_it_is() -> None:
    """However many come: the long prompt starts once the one before it has ended."""
    desk = Desk(parallel=8, idle=8, n_ctx=2048)
    (first,) = desk.add(range(1300), tenant="a", max_tokens=20)
    steps_to_first_token(desk, first)
    (long,) = desk.add(range(5000, 6300), tenant="b", max_tokens=4)
    n_steps = 0
    while long not in desk.scheduler.running:
        for i, tenant in enumerate("cdefg"):
            begin = 10_000 + 1000 * (5 * n_steps + i)
            desk.add(range(begin, begin + 200), tenant=tenant, max_tokens=40)
        desk.step()
        n_steps += 1
        passed = [job for job in desk.scheduler.running if job.tenant in "cdefg"]
        assert sum(job.n_prompt for job in passed) <= 2048 - 1300
    assert n_steps <= 25, "a few after the 20 tokens of the answer before it"
