"""The scheduler without a model: cells, and rounds of the engine."""

from __future__ import annotations

from collections import Counter
from typing import Any

from mixedkv.config.cut_rule import CutRule
from mixedkv.engine.schedule.contract import Observer, PartRun, Run, StepPlan
from mixedkv.engine.schedule.pacing import Pace
from mixedkv.engine.schedule.progress import Progress
from mixedkv.engine.schedule.request import Request
from mixedkv.engine.schedule.scheduler import Scheduler
from mixedkv.kv.checkpoint import Checkpoint
from mixedkv.kv.rows import APPROXIMATE, COMPUTED, Validities, all_of
from mixedkv.prefix.sequences import SequencePool
from mixedkv.prompts.overflow import NOWHERE, cut, head_of
from mixedkv.work.turns import Limits, unlimited

N_CTX, N_BATCH = 256, 64


class Cells:
    """The rows of a unified cache: for each sequence the cell at each position. Cells may be shared."""

    can_shift = True
    n_ctx = N_CTX

    def __init__(self, n_seq: int, rule: CutRule) -> None:
        self.n_seq, self.rule = n_seq, rule
        self.rows: list[dict[int, tuple[int, ...]]] = [
            {} for _ in range(n_seq)
        ]  # a part may have several cells
        self.n_sharing: Counter[int] = Counter()  # sequences by cell
        self.used = self.n_evaluated = 0
        self.approximate: set[int] = set()  # sequences with rows that were computed elsewhere

    def evaluate(self, seq: int, p0: int, n: int, more: int = 0) -> None:
        """Give `n` positions a cell each, and the first one `more` besides."""
        for p in range(p0, p0 + n):
            self.n_evaluated += 1
            first = self.n_evaluated * 1000
            self._put(seq, p, tuple(range(first, first + 1 + (more if p == p0 else 0))))

    def _put(self, seq: int, p: int, cells: tuple[int, ...]) -> None:
        assert p not in self.rows[seq]
        self.rows[seq][p] = cells
        for cell in cells:
            self.used += not self.n_sharing[cell]
            self.n_sharing[cell] += 1

    def remove(self, seq: int = 0, p0: int = 0, p1: int = -1) -> None:
        rows = self.rows[seq]
        if p0 == 0 and p1 < 0:
            self.approximate.discard(seq)
        for p in [p for p in rows if p0 <= p and (p1 < 0 or p < p1)]:
            for cell in rows.pop(p):
                self.n_sharing[cell] -= 1
                if not self.n_sharing[cell]:
                    del self.n_sharing[cell]
                    self.used -= 1

    def copy(self, source: int, target: int, p0: int = 0, p1: int = -1) -> None:
        for p, cells in self.rows[source].items():
            if p0 <= p and (p1 < 0 or p < p1):
                self._put(target, p, cells)

    def remove_and_shift(self, seq: int, begin: int, end: int, *, shared: Any = None) -> None:
        n = self.length(seq)
        if shared is None:
            self.remove(seq, begin, end)
            self.rows[seq] = {p - (end - begin) if p >= end else p: c for p, c in self.rows[seq].items()}
        else:
            self.remove(seq, begin)
            self.evaluate(seq, begin, n - end)

    def length(self, seq: int) -> int:
        return max(self.rows[seq], default=-1) + 1

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

    def validity(self, seq: int, tokens: Any, p0: int = 0) -> Validities:
        return all_of(len(tokens), APPROXIMATE if seq in self.approximate else COMPUTED)

    def release_hot_rows(self, seq: int) -> None:
        pass

    def hold_hot_rows(self, seq: int) -> None:
        pass


class Log(Observer):
    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.most_paused: int | None = None  # where a step that never ends would have more

    def started(self, job: Progress) -> None:
        self.seen["started"] += 1

    def cancelled(self, job: Progress) -> None:
        self.seen["cancelled"] += 1

    def evicted(self) -> None:
        self.seen["evicted"] += 1

    def paused(self) -> None:
        self.seen["paused"] += 1
        assert self.most_paused is None or self.seen["paused"] <= self.most_paused, "jobs pause each other"

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
        n_batch: int = N_BATCH,
        limits: Limits = unlimited,
    ) -> None:
        self.n_ctx = n_ctx
        rule = rule or CutRule()
        self.cells, self.log = self.make_cells(parallel + idle, rule), Log()
        self.cells.n_ctx = n_ctx
        self.outcomes: Counter[tuple[str, str]] = Counter()  # of parts, by kind and state
        self.pool = SequencePool(self.cells, parallel + idle, rule)
        self.scheduler: Scheduler[Progress] = Scheduler(
            self.pool,
            Pace(n_batch, 2.0),
            n_ctx=n_ctx,
            n_batch=n_batch,
            parallel=parallel,
            observer=self.log,
            limits=limits,
        )

    def make_cells(self, n_seq: int, rule: CutRule) -> Cells:
        return Cells(n_seq, rule)

    def add(self, *prompts: range | list[int], max_tokens: int = 8, **options: Any) -> list[Progress]:
        jobs = [
            Progress(Request(prompt=list(prompt), max_tokens=max_tokens, **options)) for prompt in prompts
        ]
        self.scheduler.add(jobs)
        return jobs

    def step(self) -> StepPlan[Progress]:
        """One round of the engine; a job leaves when it has its whole answer."""
        scheduler = self.scheduler
        scheduler.drop_cancelled()
        scheduler.admit()
        step = self._plan()
        while self.cells.used + len(step) > self.n_ctx:
            if step.n_drafts:  # drafts are given up before any job
                step = self._plan(drafts=False)
                continue
            if job := scheduler.preempt():
                scheduler.leave(job)
            step = self._plan(drafts=False)
        for run in step.runs:
            assert run.job.seq is not None
            self.cells.evaluate(run.job.seq.id, run.job.n_rows, run.n + len(run.drafts))
        scheduler.evaluated(step)
        for run in step.runs:
            if run.chooses:
                self._answer(run)
        for part_run in step.parts:
            self._evaluate_part(part_run)
        scheduler.took(step, self.seconds(step))
        scheduler.save()
        return step

    def seconds(self, step: StepPlan[Progress]) -> float:
        """How long a step takes."""
        return 0.001 * max(1, len(step))

    def _plan(self, drafts: bool = True) -> StepPlan[Progress]:
        step = self.scheduler.plan()
        if drafts and not step.n_prompt:
            for run in step.runs:
                run.drafts = [7] * self.n_drafts(run.job)
            step.n_drafts = sum(len(run.drafts) for run in step.runs)
        return step

    def n_drafts(self, job: Progress) -> int:
        """How many drafts of a job's next tokens a step has, and how many of some are right."""
        return 0

    def n_right(self, n: int) -> int:
        return n

    def _answer(self, run: Run[Progress]) -> None:
        job, seq = run.job, run.job.seq
        assert seq is not None
        n = self.n_right(len(run.drafts))
        seq.tokens.extend(run.drafts[:n])
        self.cells.remove(seq.id, len(seq.tokens))
        if job.n_answer < job.request.max_tokens:
            job.tokens.extend([7] * (n + 1))
        if job.n_answer >= job.request.max_tokens:
            self.scheduler.leave(job)
        elif job.request.slides and len(job.tokens) >= self.n_ctx:
            part = job.dropped_tokens
            head = part.begin if part is not None else head_of(NOWHERE, self.n_ctx)
            self.scheduler.drop(job, head, cut(len(job.tokens), head, self.n_ctx))
            self.scheduler.give_way(job)

    def _evaluate_part(self, run: PartRun[Progress]) -> None:
        """Evaluate a part, as `Stepper._evaluate_part` does."""
        job, part = run.job, run.part
        if job.seq is None or job.part is not part:  # it gave way to another one
            return
        found = part.evaluate(self.cells, job.prompt, job.n_rows, job.seq.id, run.n)
        self.outcomes[part.kind, found.state] += 1
        if found.state == "done":
            if found.n_reused:
                self.cells.approximate.add(job.seq.id)
            self.scheduler.part_done(run, found.n_reused)
        elif found.state == "given up":
            self.scheduler.give_up_parts(job)
        elif found.state == "no cells" and (last := self.scheduler.preempt()) is not None:
            self.scheduler.leave(last)

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
