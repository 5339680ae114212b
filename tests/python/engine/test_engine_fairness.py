"""Tenants of a real engine. Whose turn it is: test_fairness.py; over HTTP: server/test_server_fairness.py."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest

from mixedkv.engine.jobs.job import Job
from mixedkv.engine.schedule.contract import Observer
from support.patience import wait_for
from support.servers.server import Direct, end_of

pytestmark = pytest.mark.full


class Tokens(Observer):
    """What was evaluated."""

    n_evaluated = n_paused = 0

    def step(self, n_streams: int, n_prompt: int, seconds: float) -> None:
        self.n_evaluated += n_streams + n_prompt

    def paused(self) -> None:
        self.n_paused += 1


@pytest.fixture
def direct() -> Iterator[Direct]:
    with Direct(n_ctx=65536, parallel=2, idle=4, observer=Tokens(), max_queue=8) as direct:
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
