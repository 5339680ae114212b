"""Decides which jobs run, which wait, and what each step evaluates. It knows no model and no thread."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Generic

from mixedkv.engine.schedule.contract import Observer, P, PartRun, Run, StepPlan
from mixedkv.engine.schedule.fair_queue import FairQueue
from mixedkv.engine.schedule.pacing import Pace, share
from mixedkv.prefix.checkpoints import places
from mixedkv.prefix.sequences import NO_MATCH, Sequence, SequenceMatch, SequencePool, is_better
from mixedkv.tokens import Tokens, common_prefix
from mixedkv.work.turns import Limits, Service, unlimited

log = logging.getLogger("mixedkv.engine")

_WAIT_FOR = 32  # fewest tokens that are worth waiting for while another job evaluates them
_SAVE_AFTER = 32  # fewest new tokens of a continued job for which checkpoints are taken
_HEADROOM = 32  # cells an answer needs at the start besides its prompt
_LONG = 4  # a quarter of the context: what a long answer drops at a time before others have a turn
_REPAID = 64  # rows that a job evaluates again for each token that it may choose before it gives way again


class Scheduler(Generic[P]):
    """Admits jobs by weighted turns of tenants, each tenant's in order of arrival. Evaluates prompts in
    slices beside running answers. When cells run out, it evicts idle prefixes, then preempts the youngest
    answer.

    Args:
        pool: the sequences of the context.
        pace: decides how many prompt tokens go into a step.
        n_ctx: cells of the context.
        n_batch: maximum number of tokens in a step.
        parallel: maximum number of answers at a time.
        observer: told who starts, is cancelled, evicted, paused or preempted.
        limits: returns the limits of a tenant.
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
        limits: Limits = unlimited,
    ) -> None:
        self.pool, self.parallel = pool, parallel
        self.waiting: FairQueue[P] = FairQueue(limits)
        self.running: list[P] = []
        self._unstartable: list[P] = []
        self._moved: set[P] = set()  # jobs that `admit` has started or paused
        self._passed_by: P | None = None  # the job whose turn it was when it had no room
        self._passed: list[P] = []  # jobs that started before it
        self.to_save: list[Sequence] = []
        self._limits = limits
        self._prompt_service = Service(limits)  # prompt tokens by tenant, while several have prompts
        self._prompting: set[str] = set()  # tenants with prompts in the last step
        self._pace, self._observer = pace, observer
        self._n_ctx, self._n_batch = n_ctx, n_batch

    # --- jobs come and go ---

    def add(self, jobs: Iterable[P]) -> None:
        for job in jobs:
            self.waiting.append(job)

    def drop_cancelled(self) -> None:
        for job in [job for job in self.running if job.cancelled]:
            self.leave(job)
            self._observer.cancelled(job)
        for job in [job for job in self.waiting if job.cancelled]:
            self.waiting.remove(job)
            if job.paused is not None:
                job.paused.paused = False
            job.close()
            self._observer.cancelled(job)

    def leave(self, job: P) -> None:
        """Free a job's place; its rows stay as an idle prefix."""
        self.save()
        seq = self._take(job)
        if job.is_half_done or not (job.request.store or job.goes_on):
            self.pool.drop(seq)
        elif seq.tokens and job.goes_on:
            self.pool.pause(seq)
        elif seq.tokens:
            seq.n_prompt = job.n_prompt
            self.pool.release(seq, job.request.keep and not job.cancelled, job.request.session)
            self.to_save.append(seq)  # the next turn goes on from here, or a part of this one is asked again
        else:
            self.pool.drop(seq)
        job.close()

    def abandon(self, job: P) -> None:
        """Drop a job that cannot go on, and its rows, which cannot be trusted. It has left if this fails."""
        self.running.remove(job)
        assert job.seq is not None
        try:
            self.pool.drop(job.seq)
        finally:
            job.close()

    def evaluate_alone(self, job: P) -> None:
        """Take a job's rows, which another one of its step may have spoiled. It continues later from its
        tokens, in steps without others.
        """
        job.alone = True
        self._take_rows(job)

    def refetch(self, job: P) -> None:
        """Let a job go on without the rows that were fetched for it, if it can."""
        job.prefix.fetched = None
        assert job.seq is not None
        self.pool.clear(job.seq)
        if job.prefix.first:
            self.abandon(job)
            self._unstartable.append(job)

    def clear(self) -> list[P]:
        """Close and return every job; nobody owns the context's rows any more."""
        jobs = [*self.running, *self.waiting, *self._unstartable]
        self.running, self.to_save, self._unstartable = [], [], []
        self.waiting.clear()
        for job in jobs:
            try:
                job.close()
            except Exception:
                log.exception("what an answer used was not freed")
        return jobs

    def pop_unstartable(self) -> list[P]:
        """Return jobs that cannot start, since the rows they go on from have gone."""
        jobs, self._unstartable = self._unstartable, []
        for job in jobs:
            job.close()
            self._observer.cancelled(job)
        return jobs

    def _take(self, job: P) -> Sequence:
        assert job.seq is not None
        job.work.exact = job.work.exact and self.pool.is_exact(job.seq)  # before others change its rows
        self.running.remove(job)
        return job.seq

    # --- admission ---

    def admit(self) -> None:
        """Give places to waiting jobs. If none is free, a tenant that is served more than a waiting one gives
        one up.

        It ends, since a job starts or is paused at most once in a call. Work is not undone for ever either: a
        job whose rows were evicted while it was paused keeps its place until it has chosen tokens for them.
        """
        self._moved.clear()
        while self.waiting and self._admit_one():
            pass

    def _admit_one(self) -> bool:
        """Start the next job that does not wait for another job's prompt; return False if none can start.
        While the one whose turn it is has no room, others may pass it.
        """
        places, head = Counter(job.tenant for job in self.running), None
        for tenant in self.waiting.by_turn(places):
            is_full, victim = len(self.running) >= self.parallel, None
            if is_full and (other := self.waiting.who_gives_way(tenant, places)) is not None:
                victim = self._youngest(other)
            if is_full and victim is None:
                return False
            ready = (
                job
                for job in self.waiting.of(tenant)
                if job not in self._moved and not (job.prefix.reuse and self._comes_soon(job))
            )
            job = next(ready, None)
            if job is None or (head is not None and not self._may_pass(job, head)):
                continue
            if self._start(job, victim):
                if head is not None:
                    self._passed.append(job)
                return True
            head = head or job
        return False

    def _may_pass(self, job: P, head: P) -> bool:
        """Return whether a job may start before the one whose turn it is: there are cells for it, and all
        that pass leave enough for that one when those before it have ended.
        """
        if self._passed_by is not head:
            self._passed_by, self._passed = head, []
        self._passed = [each for each in self._passed if each in self.running]
        cells = job.n_cells + _HEADROOM
        left = self._n_ctx - sum(each.n_cells for each in self._passed) - head.n_cells - _HEADROOM
        promised = sum(other.n_remaining for other in self.running)
        return cells <= min(left, self._n_ctx - self.pool.used - promised)

    def _youngest(self, tenant: str) -> P | None:
        """Return a tenant's youngest running job that can be paused. A job cannot while rows are being
        loaded, in the call of `admit` that started it, and until it has made use of rows that it had lost.
        """
        jobs = (job for job in reversed(self.running) if job.tenant == tenant and job not in self._moved)
        free = (job for job in jobs if not (job.prefix.is_loading or job.is_half_done or job.holds_place))
        return next(free, None)

    def _comes_soon(self, job: P) -> bool:
        """Return whether a running job is about to evaluate rows that this one can share."""
        others = [
            other for other in self.running if other.tenant == job.tenant and other.n_rows < other.n_prompt
        ]
        here = self.match(job).n if others else 0
        for other in others:
            n = min(common_prefix(other.prompt, job.prompt), job.n_prompt - 1, other.n_shareable)
            if n - max(here, other.n_rows, job.prefix.n_fetched) >= _WAIT_FOR:
                return self._will_be_shareable(other, n, self.pool.is_exact_only(job.prefix.accept))
        return False

    def _will_be_shareable(self, other: P, n: int, exact_only: bool) -> bool:
        """Return whether the first `n` rows of another job can be shared. Most caches need a checkpoint
        there.
        """
        pool = self.pool
        if pool.rule.cut_is_exact(other.n_prompt, n) or (pool.rule.only_approximate and not exact_only):
            return True
        at = pool.rule.save_at(n, other.n_prompt)
        if at not in other.save_at and len(other.save_at) < pool.limits.per_sequence:
            other.save_also(at)
        return at in other.save_at

    def _start(self, job: P, gives_way: P | None = None) -> bool:
        """Give a job a sequence and the rows that are there for it; False when there is no room.

        Args:
            gives_way: a running job whose place it takes. That keeps its rows.
        """
        match = self._best_start(job)
        if match is None:
            self.waiting.remove(job)
            self._unstartable.append(job)
            return True
        n_cells = job.n_cells - match.n + _HEADROOM + self.pool.n_cells(match)
        if not self._make_room(job, n_cells, match.source, gives_way):
            return False
        if gives_way is not None and gives_way.seq is not None:
            self._pause(gives_way)
        if job.request.greedy and self.pool.repeats_its_prompt(match, job.n_prompt):
            match = replace(match, again=True)  # in the same cells the answer is the same, to the bit
        seq = self.pool.acquire(job.tenant, match)
        if seq is None:
            return False
        seq.dropped_tokens = job.dropped_tokens
        if job.begin(seq, match.n, match.exact):
            self._observer.started(job)
        if match.moved and job.dropped_tokens is not None:  # shifted rows are not repaired or checked
            job.no_imports()
        else:
            job.cut_parts(max(match.n, job.prefix.n_fetched))
        self._plan_checkpoints(job, seq, match)
        if (n_lost := job.n_had - max(match.n, job.prefix.n_fetched)) > 0:
            job.hold_place(1 + n_lost // _REPAID)
        job.paused, job.n_had = None, 0
        self.waiting.remove(job)
        self.running.append(job)
        self._moved.add(job)
        return True

    def _best_start(self, job: P) -> SequenceMatch | None:
        """Return the rows of the context that a job starts from, or none where stored ones are better.
        None if those that it goes on from have gone.
        """
        match, prefix = self._match(job), job.prefix
        stored = prefix.fetched
        if max(match.n, prefix.n_fetched) < prefix.first:
            return None
        if stored is None:
            return match
        if match.n >= prefix.first and not is_better(stored.n, stored.exact, match, prefix.least):
            prefix.fetched = None
            return match
        return SequenceMatch(None, 0, stored.exact, 0)

    def _plan_checkpoints(self, job: P, seq: Sequence, match: SequenceMatch) -> None:
        pool, n = self.pool, job.n_prompt
        if job.goes_on and n - match.n < _SAVE_AFTER:
            return
        job.save_at = places(pool.rule, pool.limits, job.boundaries, match.n, n)
        if pool.limits.per_sequence and not pool.rule.anywhere:
            for at in (match.longest, job.boundary):  # others may branch off there, and later turns will
                if match.n < at < n:
                    job.save_also(pool.rule.save_at(at, n))
        if match.n and match.n in job.save_at:
            pool.save(seq)

    def _match(self, job: P) -> SequenceMatch:
        if job.paused is not None:
            own = self.pool.own_rows(job.paused, job.tenant, job.all_tokens, job.prefix.most_cut)
            if own.n:
                return own
        match = self._match_plain(job)
        if job.long is None or job.work.n_cached is not None or not job.prefix.reuse:
            return match
        # a prompt that does not fit continues its last turn, without the tokens which that has dropped
        longer, n_dropped = self.pool.match_long(job.tenant, job.long)
        if longer.n <= max(match.n, job.prefix.n_fetched):
            return match
        if n_dropped != job.n_dropped:
            job.leave_out(job.long, n_dropped)
        return longer if longer.moved else self._match_plain(job)

    def _match_plain(self, job: P) -> SequenceMatch:
        match = NO_MATCH
        while job.prefix.reuse and not self.pool.confirm(match := self.match(job)):
            pass
        return match

    def match(self, job: P) -> SequenceMatch:
        """Return the best start that the context has for a job. The search is repeated only if sequences have
        changed.
        """
        prefix, state = job.prefix, (self.pool.stamp, len(job.tokens), job.n_dropped)
        if prefix.matched is None or prefix.matched[0] != state:
            options = job.request.reuse_options
            prefix.matched = state, self.pool.match(job.tenant, job.all_tokens, prefix.accept, options)
        match: SequenceMatch = prefix.matched[1]
        return match

    def _make_room(self, job: P, n_cells: int, spare: Sequence | None, gives_way: P | None = None) -> bool:
        """Evict idle prefixes, then pause answers of tenants that hold more, until `n_cells` are free besides
        what running prompts still need. `gives_way` is about to be paused.
        """
        while True:
            promised = sum(other.n_remaining for other in self.running if other is not gives_way)
            if self.pool.used + promised + n_cells <= self._n_ctx:
                return True
            if self.pool.evict(spare):
                self._observer.evicted()
            elif victim := self._holds_more(job):
                self._pause(victim)
            else:
                # a job that is alone may take all cells; otherwise it waits until another answer ends
                return not self.running

    def _holds_more(self, job: P) -> P | None:
        """Return the youngest job of the tenant with the most cells, if these are more than the given job's
        tenant would have with it. Jobs count as a whole on both sides, whether they have their rows or not:
        otherwise each of two jobs could take the other's place.
        """
        cells = self._cells(self.running)
        needed = cells.pop(job.tenant, 0.0) + (job.n_cells + _HEADROOM) / self._limits(job.tenant).weight
        most = max(cells, key=cells.__getitem__, default="")
        return self._youngest(most) if most in cells and cells[most] > needed else None

    def _cells(self, jobs: Iterable[P]) -> dict[str, float]:
        """Return the cells of each tenant's jobs, divided by its weight; cells that jobs share count for
        each.
        """
        cells: dict[str, float] = {}
        for job in jobs:
            cells[job.tenant] = cells.get(job.tenant, 0.0) + job.n_cells / self._limits(job.tenant).weight
        return cells

    # --- a step ---

    def plan(self) -> StepPlan[P]:
        """Plan the next step: a token of every answer, and slices of prompts as the pace allows."""
        ready = [job for job in self.running if not job.prefix.is_loading]
        ready = [job for job in ready if job.alone][:1] or ready
        step = StepPlan([Run(job, 1, chooses=True) for job in ready if job.n_remaining == 1])
        step.n_streams = len(step.runs)
        prompts = self._prompts_by_turn([job for job in ready if job.n_remaining > 1])
        budget = self._pace.budget(step.n_streams, len(prompts))
        budget = min(budget, self._n_batch - step.n_streams)
        for job, n in zip(prompts, share(budget, [job.n_to_do for job in prompts]), strict=True):
            if (part := job.part) is not None:
                if (n_taken := part.budget(n)) is not None:
                    step.parts.append(PartRun(job, part, n_taken))
                    step.n_prompt += n_taken
                continue
            n = job.up_to_checkpoint(n)
            if job.request.sampling and n == job.n_remaining and not step.n_streams and len(prompts) == 1:
                n -= 1  # the last token alone, as if the rows before it were cached: the same bits
            if n:
                step.runs.append(Run(job, n, chooses=n == job.n_remaining))
                step.n_prompt += n
        return step

    def _prompts_by_turn(self, prompts: list[P]) -> list[P]:
        """Order prompts by tenant: first the one with the fewest tokens evaluated for its weight."""
        tenants = {job.tenant for job in prompts}
        if len(tenants) <= 1:
            self._prompt_service.clear()
        for tenant in tenants - self._prompting:
            self._prompt_service.join(tenant, tenants & self._prompting)
        self._prompting = tenants
        return sorted(prompts, key=lambda job: self._prompt_service.of(job.tenant))

    def evaluated(self, step: StepPlan[P]) -> None:
        """Note that the step's tokens have rows."""
        self.waiting.count_step((job, self._places_of(job)) for job in self.running)
        prompts = [(run.job, run.n) for run in step.runs[step.n_streams :]]
        for job, n in [*prompts, *((run.job, run.n) for run in step.parts)]:
            self._prompt_service.add(job.tenant, n)
        new = (self._add_rows(run.job, run.n) for run in step.runs if not run.spoiled)
        self.to_save += filter(None, new)

    def _places_of(self, job: P) -> float:
        """Return for how many places a job counts: one, or what its share of the context comes to, since a
        job that fills it leaves no place to others.
        """
        return max(1.0, self.parallel * job.n_cells / self._n_ctx)

    def part_done(self, run: PartRun[P], n_reused: int) -> None:
        """Note that a part has rows, of which `n_reused` were computed elsewhere."""
        if run.part.optional:
            run.job.imported(run.part, n_reused)
        elif seq := self._add_rows(run.job, run.part.n_tokens):
            self.pool.save(seq)

    def give_up_parts(self, job: P) -> None:
        """Evaluate the tokens of a job in place of its optional parts, which could not be evaluated."""
        assert job.seq is not None
        job.no_imports()
        self.pool.clear(job.seq)
        job.work.set_cached(0, exact=True)

    def _add_rows(self, job: P, n: int) -> Sequence | None:
        """Count new rows; return the sequence if a checkpoint of it is to be taken now."""
        seq = job.seq
        assert seq is not None
        seq.tokens.extend(job.tokens[job.n_rows : job.n_rows + n])
        return seq if job.n_rows in job.save_at else None

    def save(self) -> None:
        """Take the checkpoints that are due: not before the step's tokens are on their way."""
        due, self.to_save = self.to_save, []
        for seq in due:
            try:
                self.pool.save(seq)
            except Exception:
                log.exception("a checkpoint could not be taken")

    def took(self, step: StepPlan[P], seconds: float) -> None:
        """Adapt the pace to the time that a step took."""
        self._pace.observe(step.n_streams, step.n_prompt, seconds)
        self._observer.step(step.n_streams, step.n_prompt, seconds)

    def preempt(self) -> P | None:
        """Free cells for a step that found none: those of an idle prefix, otherwise those of the youngest
        answer of the tenant that holds the most; of answers that have to make up for lost rows only if there
        are no others. If there is only one answer it has to end, and is returned.
        """
        if self.pool.evict():
            self._observer.evicted()
        elif len(self.running) > 1:
            jobs = [job for job in self.running if not job.holds_place] or self.running
            cells = self._cells(jobs)
            # of tenants that hold the same the youngest answer too, so that the oldest one gets on
            self._take_rows(max(reversed(jobs), key=lambda job: cells[job.tenant]))
        else:
            return self.running[0]
        return None

    def drop(self, job: P, begin: int, end: int) -> None:
        """Take tokens [begin, end) out of a running job; rows that cannot be moved are evaluated again."""
        seq = job.seq
        assert seq is not None
        job.drop(begin, end)
        job.work.exact = False
        if self.pool.can_move:
            self._remove_and_shift(seq, begin, end)
        else:
            self.pool.clear(seq)
        seq.dropped_tokens = job.dropped_tokens

    def drop_waiting(
        self, seq: Sequence, tenant: str, tokens: Tokens, begin: int, end: int, most_cut: int = 0
    ) -> bool:
        """Take tokens [begin, end) out of the rows of `tokens`, which wait for their next job. Up to
        `most_cut` rows behind these are taken away first. Returns False where the rows have gone or cannot
        be moved.
        """
        n = len(tokens)
        if seq.common(tokens) < n or self.pool.go_back(seq, tenant, n, most_cut).n < n:
            return False
        return self._remove_and_shift(seq, begin, end)

    def _remove_and_shift(self, seq: Sequence, begin: int, end: int) -> bool:
        """Drop [begin, end) of a sequence and shift later rows, which are copied where they are shared."""
        pool = self.pool
        while pool.used + pool.n_copied(seq, end) > self._n_ctx and pool.evict(spare=seq):
            self._observer.evicted()
        return pool.remove_and_shift(seq, begin, end)

    def give_way(self, job: P) -> None:
        """Pause a long answer that has just dropped tokens until the waiting jobs had a turn, since it would
        hold all cells without an end in sight.
        """
        if self.waiting and job.n_answer >= self._n_ctx // _LONG:
            self._pause(job)
            self.waiting.remove(job)
            self.waiting.append(job)

    def _pause(self, job: P) -> None:
        """Take a job's place. It continues later from its rows, if nobody needs the cells meanwhile."""
        job.n_had = job.n_rows
        seq = self._take(job)
        self.pool.pause(seq)
        job.paused = seq
        self._wait_again(job)
        self._observer.paused()

    def _take_rows(self, job: P) -> None:
        """Take a job's rows. It continues later from its tokens."""
        job.n_had = job.n_rows
        self.pool.drop(self._take(job))
        self._wait_again(job)
        self._observer.preempted()

    def _wait_again(self, job: P) -> None:
        job.seq = None
        job.prefix.fetched = None
        job.no_imports()
        self.waiting.appendleft(job)
        self._moved.add(job)
