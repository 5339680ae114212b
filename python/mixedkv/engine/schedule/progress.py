"""State of a request's evaluation, which the scheduler reads and writes."""

from __future__ import annotations

import time

from mixedkv.engine.schedule.prefix_source import PrefixSource
from mixedkv.engine.schedule.prompt_tokens import PromptTokens
from mixedkv.engine.schedule.request import Request
from mixedkv.engine.schedule.work_counts import WorkCounts
from mixedkv.prefix.sequences import Sequence
from mixedkv.prompts.overflow import LongPrompt
from mixedkv.prompts.part import PromptPart


class Progress(PromptTokens):
    """The progress of a request. After `Engine.submit_jobs` only the engine's thread uses it.

    Attributes:
        prefix: which existing rows it may start from.
        work: what it took so far.
        fits: the prompt was checked and fits the context.
        most_in_step: how many tokens of the prompt a step evaluates at most.
        alone: it is evaluated in steps without others until it has chosen a token, since values of a step
            with others were no numbers.
        goes_on: another request continues this one: the rows wait for it, as its `paused`.
        cancelled: set from any thread, read between steps.
        seq: the sequence it has; None while it waits.
        paused: the sequence that holds its rows while it waits.
        n_had: rows that it had when it was paused or preempted.
        save_at: take a checkpoint of the sequence when it has so many tokens, ascending.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.request, self.tenant = request, request.tenant
        self.prefix, self.work = PrefixSource(request), WorkCounts()
        self.most_in_step: int | None = None
        self.alone = self.goes_on = self.cancelled = self.fits = False
        self.seq: Sequence | None = None
        self.paused: Sequence | None = None
        self.n_had = 0
        self.save_at: list[int] = []
        self._held_until = 0  # tokens of the answer

    @property
    def n_rows(self) -> int:
        """Return how many tokens have rows."""
        return len(self.seq.tokens) if self.seq is not None else 0

    @property
    def n_remaining(self) -> int:
        """Return how many tokens to evaluate before the next one can be chosen."""
        return len(self.tokens) - self.n_rows

    def hold_place(self, n: int) -> None:
        """Keep the place until `n` more tokens of the answer are chosen."""
        self._held_until = self.n_answer + n

    @property
    def holds_place(self) -> bool:
        """True if it does not give way to others now."""
        return self.n_answer < self._held_until

    def save_also(self, n: int) -> None:
        """Take a checkpoint after `n` tokens too."""
        self.save_at = sorted({*self.save_at, n})

    @property
    def part(self) -> PromptPart | None:
        """Return the part to evaluate next; None if a token is next."""
        return self.parts.get(self.n_rows)

    @property
    def is_half_done(self) -> bool:
        """True while a part is being evaluated in slices. Until that is done nobody else can use the rows."""
        return (part := self.part) is not None and part.n_left is not None

    @property
    def n_to_do(self) -> int:
        """Return about how many tokens are still to be evaluated."""
        part = self.part
        return part.n_left if part is not None and part.n_left is not None else self.n_remaining

    def up_to_checkpoint(self, n: int) -> int:
        """Return how many of the next `n` tokens come before the next checkpoint or part."""
        if self.most_in_step is not None:
            n = min(n, self.most_in_step)
        n_rows = self.n_rows
        return min([n, *(at - n_rows for at in (*self.save_at, *self.parts) if at > n_rows)])

    def begin(self, seq: Sequence, n_cached: int, exact: bool) -> bool:
        """Have a sequence with `n_cached` tokens of the prompt in it, which can be gone on from exactly or
        not. Returns whether it is the first, so not after a pause or a preemption.
        """
        work, self.seq = self.work, seq
        if work.n_cached is not None:
            return False
        work.set_cached(n_cached, exact)
        if self.prefix.fetched is not None and self.prefix.is_loading:
            work.cached_tier = self.prefix.fetched.tier
        else:
            work.cached_tier = "context" if n_cached else ""
        work.t_start = time.perf_counter()
        return True

    def import_rows(self, begin: int, part: PromptPart | None, method: str) -> None:
        """Set a part whose rows were computed elsewhere, if some were found, and how they are repaired."""
        self.work.method = method
        if part is not None:
            self.parts[begin] = part

    def no_imports(self) -> None:
        """Evaluate all tokens."""
        self.drop_optional_parts()
        self.work.method = ""

    def imported(self, part: PromptPart, n_reused: int) -> None:
        """Note that a part has rows of which `n_reused` were computed elsewhere: nobody else can use them as
        exact ones.
        """
        assert self.seq is not None
        self.seq.tokens.extend(self.tokens[self.n_rows : self.n_rows + part.n_tokens])
        self.seq.assembled, self.seq.reuse_options = True, self.request.reuse_options
        self.work.add_reused(n_reused)
        self.drop_optional_parts()

    @property
    def n_evaluated(self) -> int:
        """Return how many tokens of the prompt were evaluated before the answer began."""
        return self.n_given - self.n_left_out - (self.work.n_cached or 0)

    def leave_out(self, long: LongPrompt, n: int) -> None:
        super().leave_out(long, n)
        self.prefix.fetched = None
        self.no_imports()

    def drop(self, begin: int, end: int) -> None:
        super().drop(begin, end)
        self.save_at = []

    def close(self) -> None:
        """Free what is only needed while the job runs; the numbers stay."""
        self.prefix.fetched = self.long = None
        self.drop_optional_parts()
