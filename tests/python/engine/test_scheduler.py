"""The scheduler without a model: who starts, who waits, what a step holds, who has to give way."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixedkv._core import HotWindow
from mixedkv.config.cut_rule import CutRule
from mixedkv.engine.schedule.progress import Progress
from support.engine.scheduler import N_BATCH, N_CTX, Desk
from support.engine.toy_parts import SlicedPart

pytestmark = pytest.mark.core


def test_places_are_given_in_order_of_arrival() -> None:
    desk = Desk(parallel=2)
    a, b, c = desk.add(range(40), range(100, 120), range(200, 210))
    desk.step()
    assert desk.scheduler.running == [a, b]
    assert list(desk.scheduler.waiting) == [c]
    desk.finish()
    assert [job.n_answer for job in (a, b, c)] == [8, 8, 8]
    assert desk.log.seen["started"] == 3


def test_an_answer_gets_a_token_in_every_step_while_a_prompt_is_evaluated() -> None:
    desk = Desk()
    (talker,) = desk.add(range(10))
    desk.step()
    (long,) = desk.add(range(1000, 1200))
    while talker.n_answer < 6:
        n, step = talker.n_answer, desk.step()
        assert talker.n_answer == n + 1
        assert len(step) <= N_BATCH
    desk.finish()
    assert long.n_answer == 8


def test_a_step_without_answers_takes_a_whole_batch() -> None:
    desk = Desk()
    desk.add(range(150))
    assert [desk.step().n_prompt for _ in range(3)] == [64, 64, 22]


def test_who_wants_what_another_evaluates_waits_for_it() -> None:
    desk = Desk(parallel=4, idle=4)
    shared = list(range(100))
    a, b = desk.add([*shared, 500], [*shared, 600])
    desk.step()
    assert desk.scheduler.running == [a]
    desk.finish()
    assert (a.work.n_cached, b.work.n_cached) == (0, 100)
    assert b.work.exact


def with_slices(desk: Desk, begin: int, prompt: range) -> Progress:
    """A job whose prompt is evaluated in slices from `begin` on, whose rows come from elsewhere."""
    (job,) = desk.add(prompt)
    job.prefix.accept = "chunks"
    never = random.Random()
    never.random = lambda: 1.0  # type: ignore[method-assign]
    job.import_rows(begin, SlicedPart(len(prompt) - 1 - begin, never), "toy")
    return job


def test_a_part_takes_its_share_of_steps_beside_answers() -> None:
    desk = Desk()
    (talker,) = desk.add(range(10), max_tokens=100)
    desk.step()
    job = with_slices(desk, 40, range(1000, 1150))
    while not job.n_answer:
        n, step = talker.n_answer, desk.step()
        assert talker.n_answer == n + 1
        assert len(step) <= N_BATCH
        assert job.n_rows in (*range(41), 149, 150)  # half-done rows are not counted
    assert desk.outcomes["sliced", "goes on"] > 1
    assert desk.outcomes["sliced", "done"] == 1
    assert (job.work.n_approximate, job.work.n_cached) == (54, 54)
    assert not job.parts
    desk.scheduler.leave(job)
    assert not job.work.exact
    assert talker.work.exact


def test_rows_of_a_part_that_is_half_done_go_with_their_job() -> None:
    desk = Desk()
    (talker,) = desk.add(range(10), max_tokens=100)
    desk.step()
    job = with_slices(desk, 40, range(1000, 1150))
    while not job.is_half_done:
        desk.step()
    assert desk.scheduler._youngest("") is talker  # it cannot be paused now
    job.cancelled = True
    desk.finish()
    assert talker.n_answer == 100
    assert [seq.tokens[0] for seq in desk.pool.held()] == [0]


def test_a_part_without_room_is_evaluated_as_tokens() -> None:
    desk = Desk(parallel=1, idle=1)
    desk.add(range(1000, 1040))
    desk.finish()
    job = with_slices(desk, 60, range(1000, 1100))
    part = job.parts[60]
    assert isinstance(part, SlicedPart)
    part._chance.random = lambda: 0.0  # type: ignore[method-assign]
    desk.finish()
    assert desk.outcomes == {("sliced", "given up"): 1}
    assert (job.n_answer, job.work.exact, job.work.n_cached) == (8, True, 0)


def test_tenants_do_not_wait_for_each_other() -> None:
    desk = Desk(parallel=4, idle=4)
    a, b = (desk.add(range(100), tenant=name)[0] for name in "ab")
    desk.finish()
    assert (a.work.n_cached, b.work.n_cached) == (0, 0)


def test_a_mixed_cache_takes_a_checkpoint_where_others_branch_off() -> None:
    """Rows at 100 of a longer sequence have lost their F16 copies: they are saved on the way."""
    rule = CutRule(HotWindow(16, 8, 0))
    desk = Desk(parallel=4, idle=4, rule=rule)
    shared = list(range(100))
    a, b = desk.add([*shared, *range(500, 560)], [*shared, 600])
    desk.step()
    assert rule.save_at(100, 160) in a.save_at
    desk.finish()
    assert b.work.n_cached == 100
    assert b.work.exact


def test_idle_prefixes_go_before_answers() -> None:
    desk = Desk(parallel=2, idle=2)
    for i in range(6):
        desk.add(range(1000 * i, 1000 * i + 100))
        desk.finish()
    assert desk.log.seen["evicted"] >= 3
    assert desk.log.seen["preempted"] == 0
    assert desk.cells.used <= N_CTX


def test_the_youngest_gives_way_and_goes_on_later() -> None:
    desk = Desk(parallel=3, idle=1)
    jobs = desk.add(range(100), range(1000, 1100), range(2000, 2100), max_tokens=60)  # 3 x 160 of 256 cells
    desk.finish()
    assert desk.log.seen["preempted"] > 0
    assert [job.n_answer for job in jobs] == [60, 60, 60]
    assert desk.log.seen["started"] == 3  # who comes back has started before


def test_the_only_answer_has_to_end_when_nothing_is_left() -> None:
    desk = Desk(parallel=1, idle=1)
    (job,) = desk.add(range(200), max_tokens=1000)
    desk.finish()
    assert job.n_answer == N_CTX - 200 + 1  # the last one has no row


def test_cancelled_jobs_leave_before_the_next_step() -> None:
    desk = Desk(parallel=1, idle=1)
    running, waiting, other = desk.add(range(10), range(100, 110), range(200, 210), keep=True)
    desk.step()
    running.cancelled = waiting.cancelled = True
    desk.step()
    assert desk.scheduler.running == [other]
    assert desk.log.seen["cancelled"] == 2
    assert not any(seq.keep for seq in desk.pool.held())


def test_what_is_abandoned_leaves_no_rows() -> None:
    desk = Desk()
    (job,) = desk.add(range(50))
    desk.step()
    desk.scheduler.abandon(job)
    assert (desk.cells.used, desk.scheduler.running, desk.pool.held()) == (0, [], [])


def test_clear_returns_everybody() -> None:
    desk = Desk(parallel=1, idle=1)
    jobs = desk.add(range(10), range(100, 110))
    desk.step()
    assert desk.scheduler.clear() == jobs
    assert not desk.scheduler.running
    assert not desk.scheduler.waiting


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 180), st.integers(0, 30)), max_size=12), st.data()
)
def test_everybody_ends_and_no_cell_is_lost(work: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """Random prompts that share beginnings, random arrivals and cancellations."""
    rules = [CutRule(), CutRule(HotWindow(16, 8, 2)), CutRule(sliding=20), CutRule(recurrent=True)]
    desk = Desk(parallel=3, idle=3, rule=data.draw(st.sampled_from(rules)))
    jobs: list[Progress] = []
    for stem, n, later in work:
        prompt, tenant = [stem * 1000 + i for i in range(n)], data.draw(st.sampled_from("ab"))
        jobs += desk.add(prompt, tenant=tenant, max_tokens=1 + n % 9)
        for _ in range(later):
            desk.step()
        if data.draw(st.integers(0, 5)) == 0:
            data.draw(st.sampled_from(jobs)).cancelled = True
    desk.finish(2000)
    assert all(job.cancelled or job.n_answer >= 1 for job in jobs)
    assert not any(seq.running for seq in desk.pool.held())
    for seq in desk.pool.held():
        assert sorted(desk.cells.rows[seq.id]) == list(range(len(seq.tokens)))
    while desk.pool.evict():
        pass
    assert desk.cells.used == 0


@pytest.mark.parametrize("n_prompts", [1, 3])
def test_plans_hold_what_they_say(n_prompts: int) -> None:
    desk = Desk(parallel=4, idle=2)
    desk.add(*(range(1000 * i, 1000 * i + 50) for i in range(n_prompts)))
    step = desk.step()
    assert len(step) == sum(run.n for run in step.runs) == step.n_prompt
    assert np.all([run.chooses == (run.job.n_answer > 0) for run in step.runs])
