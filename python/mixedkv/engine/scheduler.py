"""Which jobs run, which wait, and what each step evaluates. It knows no model and no thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from mixedkv.engine.job import Job
from mixedkv.engine.observer import Observer
from mixedkv.engine.pacing import Pace, share
from mixedkv.engine.sequences import NO_MATCH, Match, Sequence, SequencePool
from mixedkv.tokens import common_prefix

_WAIT_FOR = 32  # tokens that another job is about to evaluate and that are worth waiting for
_HEADROOM = 32  # cells an answer needs at the start besides its prompt


@dataclass(frozen=True, slots=True)
class Run:
    """The next `n` tokens of a job; `chooses`: the token after them is chosen from the last one's logits."""

    job: Job
    n: int
    chooses: bool


@dataclass(slots=True)
class Step:
    """What one `llama_decode` evaluates: a token of `n_streams` answers each, and `n_prompt` of prompts."""

    runs: list[Run] = field(default_factory=list)
    n_streams: int = 0
    n_prompt: int = 0

    def __len__(self) -> int:
        """Tokens."""
        return self.n_streams + self.n_prompt


class Scheduler:
    """Admission in order of arrival, prompts in slices beside running answers, eviction of idle prefixes and
    preemption of the youngest answer when cells run out.

    Args:
        pool: the sequences of the context.
        pace: how much of prompts goes into a step.
        n_ctx: cells of the context.
        n_batch: tokens in a step at most.
        parallel: answers at a time.
        observer: told who starts, is cancelled, evicted or preempted.
    """

    def __init__(
        self,
        pool: SequencePool,
        pace: Pace,
        *,
        n_ctx: int,
        n_batch: int,
        parallel: int,
        observer: Observer,
    ) -> None:
        self.pool, self.parallel = pool, parallel
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self._pace, self._observer = pace, observer
        self._n_ctx, self._n_batch = n_ctx, n_batch

    # --- jobs come and go ---

    def add(self, jobs: Iterable[Job]) -> None:
        self.waiting.extend(jobs)

    def drop_cancelled(self) -> None:
        for job in [job for job in self.running if job.cancelled]:
            self.leave(job)
            self._observer.cancelled(job)
        if any(job.cancelled for job in self.waiting):
            for job in self.waiting:
                if job.cancelled:
                    job.close()
                    self._observer.cancelled(job)
            self.waiting = deque(job for job in self.waiting if not job.cancelled)

    def leave(self, job: Job) -> None:
        """A job's place is free; its rows stay as an idle prefix."""
        seq = self._take(job)
        if seq.tokens:
            self.pool.release(seq, job.keep and not job.cancelled, job.session)
        else:
            self.pool.drop(seq)
        job.close()

    def abandon(self, job: Job) -> None:
        """A job cannot go on, and its rows are not to be trusted."""
        self.pool.drop(self._take(job))
        job.close()

    def clear(self) -> list[Job]:
        """Every job there was, closed; what the context holds is nobody's any more."""
        jobs = [*self.running, *self.waiting]
        for job in jobs:
            job.close()
        self.running, self.waiting = [], deque()
        return jobs

    def _take(self, job: Job) -> Sequence:
        self.running.remove(job)
        assert job.seq is not None
        return job.seq

    # --- admission ---

    def admit(self) -> None:
        """Give places to waiting jobs in their order, past those that wait for another's prompt."""
        for job in list(self.waiting):
            if len(self.running) >= self.parallel:
                return
            if job.reuse and self._comes_soon(job):
                continue
            if not self._start(job):
                return
            self.waiting.remove(job)

    def _comes_soon(self, job: Job) -> bool:
        """A running job is about to evaluate what this one can then share."""
        here = self.pool.match(job.tenant, job.prompt).n
        for other in self.running:
            if other.tenant == job.tenant and other.n_rows < other.n_prompt:
                n = min(common_prefix(other.prompt, job.prompt), job.n_prompt - 1)
                if n - max(here, other.n_rows, job.n_fetched) >= _WAIT_FOR:
                    return self._worth_it(other, n)
        return False

    def _worth_it(self, other: Job, n: int) -> bool:
        """Only rows that can be shared are worth waiting for: a mixed cache needs a copy at that length."""
        if n >= other.n_prompt - 1:
            return True
        if self.pool.exact_only and not self.pool.window.cut_is_exact(other.n_prompt, n):
            other.snapshot_at = other.snapshot_at or n
            return other.snapshot_at == n
        return True

    def _start(self, job: Job) -> bool:
        """Give a job a sequence and the rows that are there for it; False when there is no room."""
        match = self.pool.match(job.tenant, job.all_tokens) if job.reuse else NO_MATCH
        if job.n_fetched < match.n + _WAIT_FOR:
            job.forget_blocks()
        elif job.n_fetched:
            match = Match(None, 0, job.blocks_exact, 0)
        if not self._make_room(len(job.tokens) - match.n + _HEADROOM, match.source):
            return False
        seq = self.pool.acquire(job.tenant, match)
        if seq is None:
            return False
        if job.begin(seq, match.n):
            self._observer.started(job)
        if match.approximate > match.n:
            job.snapshot_at = match.approximate
        self.running.append(job)
        return True

    def _make_room(self, n_cells: int, spare: Sequence | None) -> bool:
        """Evict idle prefixes until `n_cells` are free besides what running prompts still need."""
        while True:
            promised = sum(job.n_remaining for job in self.running)
            if self.pool.used + promised + n_cells <= self._n_ctx:
                return True
            if not self.pool.evict(spare):
                # alone it may have what there is; else it waits until another answer is done
                return not self.running
            self._observer.evicted()

    # --- a step ---

    def plan(self) -> Step:
        """What to evaluate next: a token of every answer, and slices of prompts as the pace allows."""
        step = Step([Run(job, 1, chooses=True) for job in self.running if job.n_remaining == 1])
        step.n_streams = len(step.runs)
        prompts = [job for job in self.running if job.n_remaining > 1 and not job.blocks]
        budget = self._pace.budget(step.n_streams, len(prompts))
        budget = min(budget, self._n_batch - step.n_streams)
        for job, n in zip(prompts, share(budget, [job.n_remaining for job in prompts]), strict=True):
            n = job.up_to_snapshot(n)
            if n:
                step.runs.append(Run(job, n, chooses=n == job.n_remaining))
                step.n_prompt += n
        return step

    def evaluated(self, step: Step) -> None:
        """The step's tokens have rows now."""
        for run in step.runs:
            job, seq = run.job, run.job.seq
            assert seq is not None
            seq.tokens.extend(job.tokens[job.n_rows : job.n_rows + run.n])
            if job.n_rows == job.snapshot_at:
                self.pool.snapshot(seq)
                job.snapshot_at = 0

    def took(self, step: Step, seconds: float) -> None:
        """How long a step was: the pace follows."""
        self._pace.observe(step.n_streams, step.n_prompt, seconds)
        self._observer.step(step.n_streams, step.n_prompt, seconds)

    def relieve(self) -> Job | None:
        """Free cells for a step that found none: of an idle prefix, else of the youngest answer. The only
        answer there is has to end: it is returned.
        """
        if self.pool.evict():
            self._observer.evicted()
        elif len(self.running) > 1:
            self._preempt(self.running[-1])
        else:
            return self.running[0]
        return None

    def _preempt(self, job: Job) -> None:
        """Take a job's rows and let it go on later from its tokens."""
        self.pool.drop(self._take(job))
        job.seq = None
        self.waiting.appendleft(job)
        self._observer.preempted()
