"""Tenants of a real engine: one with many endless answers does not keep others from theirs."""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from mixedkv.bundled.corpus import make_recall
from mixedkv.engine.jobs.job import Job
from mixedkv.engine.schedule.contract import Observer
from mixedkv.engine.schedule.fair_queue import TenantLimits
from mixedkv.engine.schedule.progress import Progress
from mixedkv.errors import QueueFullError
from support.patience import wait_for
from support.server_support import Direct, end_of

LIMITS = {"few": TenantLimits(running=1, queued=1), "heavy": TenantLimits(weight=3)}


class Tokens(Observer):
    """What was evaluated and chosen."""

    def __init__(self) -> None:
        self.n_evaluated = self.n_paused = 0
        self.chosen: Counter[str] = Counter()  # by tenant
        self.then: Counter[str] = Counter()  # when "heavy" had 2,000

    def token(self, job: Progress, now: float) -> None:
        self.chosen[job.tenant] += 1
        if self.chosen["heavy"] == 2000 and not self.then:
            self.then = self.chosen.copy()

    def step(self, n_streams: int, n_prompt: int, seconds: float) -> None:
        self.n_evaluated += n_streams + n_prompt

    def paused(self) -> None:
        self.n_paused += 1


@pytest.fixture
def direct() -> Iterator[Direct]:
    def limits(tenant: str) -> TenantLimits:
        return LIMITS.get(tenant, TenantLimits())

    with Direct(n_ctx=65536, parallel=2, idle=4, observer=Tokens(), limits=limits, max_queue=8) as direct:
        yield direct


def jobs_of(direct: Direct, n: int, tenant: str, n_tokens: int) -> list[tuple[Job, queue.Queue[Any]]]:
    """Jobs that are not submitted yet, and their events."""
    return [direct.job([5 + i] * 20, n_tokens, tenant=tenant, ignore_end=True) for i in range(n)]


def endless(direct: Direct, n: int, tenant: str) -> list[Job]:
    """Jobs at work that take a minute and more."""
    jobs = [job for job, _ in jobs_of(direct, n, tenant, 100_000)]
    direct.engine.submit_jobs(jobs)
    return jobs


def stop(direct: Direct, jobs: list[Job]) -> None:
    for job in jobs:
        direct.engine.cancel(job)
    wait_for(lambda: not (direct.engine.n_running or direct.engine.n_queued), pause=0.001)


def test_an_answer_comes_while_another_tenants_are_endless(direct: Direct) -> None:
    many = endless(direct, 8, "many")
    wait_for(lambda: direct.engine.n_running == 2)
    recall = make_recall(3, 12)
    job, events = direct.job(recall.prompt, tenant="one")
    then: list[int] = []

    def deliver(event: Any) -> None:
        then.extend(job.n_answer for job in many)
        events.put(event)

    job.deliver = deliver
    before = direct.call(lambda: (direct.engine.submit_jobs([job]), [job.n_answer for job in many])[1])
    assert end_of(events).text == recall.fact.answer
    assert all(n - n_before < 3000 for n, n_before in zip(then, before, strict=True))  # none had to end
    stop(direct, many)


def test_paused_answers_cost_nothing_and_are_whole(direct: Direct) -> None:
    """What was evaluated is each prompt and each answer once, whoever was paused."""
    alone = [direct.answer([5 + i] * 20, 200, ignore_end=True)[1].text for i in range(3)]
    observer = direct.engine.observer
    assert isinstance(observer, Tokens)
    before = observer.n_evaluated
    started = [pair for tenant in ("a", "b", "c") for pair in jobs_of(direct, 3, tenant, 200)]
    direct.engine.submit_jobs([job for job, _ in started])
    ends = [end_of(events) for _, events in started]
    assert observer.n_paused >= 6
    assert observer.n_evaluated - before == 9 * (20 + 199)
    assert all(job.exact and job.n_answer == 200 for job, _ in started)
    assert [end.text[:30] for end in ends] == [text[:30] for text in alone] * 3


def test_tokens_go_by_weight(direct: Direct) -> None:
    jobs = [job for tenant in ("light", "heavy") for job, _ in jobs_of(direct, 2, tenant, 2000)]
    direct.engine.submit_jobs(jobs)
    observer = direct.engine.observer
    assert isinstance(observer, Tokens)
    wait_for(lambda: observer.then)
    assert observer.then["heavy"] / observer.then["light"] == pytest.approx(3, rel=0.1)
    stop(direct, jobs)


def test_each_tenant_has_a_queue_of_its_own(direct: Direct) -> None:
    engine = direct.engine
    assert (engine.most_jobs("few"), engine.most_jobs("any")) == (2, 10)
    many = endless(direct, 10, "many")
    wait_for(lambda: engine.n_running == 2)
    with pytest.raises(QueueFullError, match="8 requests wait"):
        endless(direct, 1, "many")
    few = endless(direct, 1, "few")
    wait_for(lambda: any(job.tenant == "few" for job in engine._scheduler.running))
    few += endless(direct, 1, "few")
    with pytest.raises(QueueFullError, match="1 requests wait"):
        endless(direct, 1, "few")
    stop(direct, [*many, *few])


def test_who_has_nothing_here_may_bring_one(direct: Direct) -> None:
    direct.engine.max_queue = 0
    many = endless(direct, 2, "many")
    wait_for(lambda: direct.engine.n_running == 2)
    assert direct.answer([9] * 20, 3, tenant="one", ignore_end=True)[0].n_answer == 3
    stop(direct, many)


@pytest.mark.parametrize("kv", ["f16", "mixed"])
def test_prompts_of_two_tenants_that_do_not_fit_together_are_both_answered(kv: str) -> None:
    """The second comes while the first is evaluated."""
    with Direct(kv=kv, n_ctx=1024) as direct:
        first, answer = direct.start([5] * 700, 4, tenant="a", ignore_end=True)
        wait_for(lambda: first.n_rows > 0 or first.evaluated)
        _, done = direct.answer([6] * 660, 4, tenant="b", ignore_end=True)
        assert done.reason == end_of(answer).reason == "length"
