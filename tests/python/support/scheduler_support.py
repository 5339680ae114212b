"""The scheduler without a model: cells, and rounds of the engine."""

from __future__ import annotations

from collections import Counter
from typing import Any

from mixedkv.config.cut_rule import CutRule
from mixedkv.engine.schedule.contract import StepPlan
from mixedkv.engine.schedule.observer import Observer
from mixedkv.engine.schedule.pacing import Pace
from mixedkv.engine.schedule.progress import Progress
from mixedkv.engine.schedule.request import Request
from mixedkv.engine.schedule.scheduler import Scheduler
from mixedkv.engine.schedule.sequences import SequencePool
from mixedkv.engine.schedule.tenant_limits import Limits, unlimited
from mixedkv.kv.checkpoint import Checkpoint

N_CTX, N_BATCH = 256, 64


class Cells:
    """The rows of a unified cache: each cell with the sequences that share it."""

    def __init__(self, n_seq: int, rule: CutRule) -> None:
        self.n_seq, self.rule = n_seq, rule
        self.cells: dict[tuple[int, int], set[int]] = {}  # (owner when evaluated, position) -> sequences
        self.n_evaluated = 0

    @property
    def used(self) -> int:
        return len(self.cells)

    def evaluate(self, seq: int, p0: int, n: int) -> None:
        for p in range(p0, p0 + n):
            self.n_evaluated += 1
            self.cells[self.n_evaluated, p] = {seq}

    def remove(self, seq: int, p0: int = 0) -> None:
        for key in [key for key, seqs in self.cells.items() if key[1] >= p0 and seq in seqs]:
            self.cells[key].discard(seq)
            if not self.cells[key]:
                del self.cells[key]

    def copy(self, source: int, target: int, p0: int = 0, p1: int = -1) -> None:
        for (_, p), seqs in self.cells.items():
            if source in seqs and p0 <= p and (p1 < 0 or p < p1):
                seqs.add(target)

    def length(self, seq: int) -> int:
        return max((p + 1 for (_, p), seqs in self.cells.items() if seq in seqs), default=0)

    def checkpoint(self, seq: int) -> Checkpoint:
        n = self.length(seq)
        return Checkpoint(n=n, first=self.rule.saved_from(n))

    def resume(self, point: Checkpoint, n: int, source: int, target: int) -> None:
        assert point.serves(n)
        assert n <= self.length(source)
        if source != target:
            self.remove(target)
            self.copy(source, target, 0, n)
        self.remove(target, n)

    def holds(self, seq: int, n: int) -> bool:
        return self.rule.cut_is_exact(self.length(seq), n)

    def short_from(self) -> list[int]:
        return [-1] * self.n_seq

    def rest(self, seq: int) -> None:
        pass

    def wake(self, seq: int) -> None:
        pass


class Log(Observer):
    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def started(self, job: Progress) -> None:
        self.seen["started"] += 1

    def cancelled(self, job: Progress) -> None:
        self.seen["cancelled"] += 1

    def evicted(self) -> None:
        self.seen["evicted"] += 1

    def paused(self) -> None:
        self.seen["paused"] += 1

    def preempted(self) -> None:
        self.seen["preempted"] += 1


class Desk:
    """A scheduler, the cells it rules, and steps that choose the token 7 for everybody."""

    def __init__(
        self,
        parallel: int = 2,
        idle: int = 2,
        rule: CutRule | None = None,
        *,
        n_ctx: int = N_CTX,
        limits: Limits = unlimited,
    ) -> None:
        self.n_ctx = n_ctx
        rule = rule or CutRule()
        self.cells, self.log = Cells(parallel + idle, rule), Log()
        self.pool = SequencePool(self.cells, parallel + idle, rule)
        self.scheduler: Scheduler[Progress] = Scheduler(
            self.pool,
            Pace(N_BATCH, 2.0),
            n_ctx=n_ctx,
            n_batch=N_BATCH,
            parallel=parallel,
            observer=self.log,
            limits=limits,
        )

    def add(self, *prompts: range | list[int], max_tokens: int = 8, **options: Any) -> list[Progress]:
        jobs = [
            Progress(Request(prompt=list(prompt), max_tokens=max_tokens, **options)) for prompt in prompts
        ]
        self.scheduler.add(jobs)
        return jobs

    def step(self) -> StepPlan[Progress]:
        """One round of the engine; a job leaves after its eighth token."""
        scheduler = self.scheduler
        scheduler.drop_cancelled()
        scheduler.admit()
        step = scheduler.plan()
        while self.cells.used + len(step) > self.n_ctx:
            if job := scheduler.relieve():
                scheduler.leave(job)
            step = scheduler.plan()
        for run in step.runs:
            assert run.job.seq is not None
            self.cells.evaluate(run.job.seq.id, run.job.n_rows, run.n)
        scheduler.evaluated(step)
        for run in step.runs:
            if run.chooses:
                run.job.tokens.append(7)
                if run.job.n_answer >= run.job.request.max_tokens:
                    scheduler.leave(run.job)
        scheduler.took(step, 0.001 * max(1, len(step)))
        scheduler.save()
        return step

    def finish_one(self, job: Progress, limit: int = 500) -> None:
        """Until a job has its whole answer."""
        for _ in range(limit):
            if job.n_answer == job.request.max_tokens:
                return
            self.step()
        raise AssertionError("the job does not end")

    def finish(self, limit: int = 500) -> None:
        for _ in range(limit):
            if not (self.scheduler.running or self.scheduler.waiting):
                return
            self.step()
        raise AssertionError("jobs do not end")
