"""State of a request's evaluation, which the scheduler reads and writes."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mixedkv.engine.schedule.request import Request
from mixedkv.prompts.overflow import Gap, LongPrompt, without
from mixedkv.prompts.part import PromptPart, place
from mixedkv.start.sequences import Reuse, Sequence
from mixedkv.tokens import Tokens


class StoredPrefix(Protocol):
    """Rows of the first tokens of a prompt that come from a store."""

    n: int
    tier: str
    exact: bool

    @property
    def is_loaded(self) -> bool: ...


_LEAST = 32  # tokens


class PromptTokens:
    """The tokens of a request's prompt and answer, without those that do not fit the context.

    Attributes:
        prompt: the request's, without what was left out.
        tokens: prompt and answer.
        n_prompt, n_given: tokens of the prompt, and of the request's prompt.
        long: where the prompt does not fit, all of it.
        gap: what is missing in `tokens`, and in `prompt`.
        n_left_out, n_answer_dropped: tokens missing in the prompt before work began, and in the answer.
        boundaries: where messages of the prompt begin and end.
        boundary: how many of its tokens the prompt of the next turn will begin with; 0 for all.
        parts: parts of the prompt that are evaluated by themselves, by where they begin.
    """

    def __init__(self, request: Request) -> None:
        self.prompt: Tokens = np.asarray(request.prompt, np.int32)
        self.tokens = array("i", self.prompt.tobytes())
        self.n_prompt = self.n_given = len(self.tokens)
        self.long: LongPrompt | None = None
        self.gap: Gap | None = None
        self.n_left_out = self.n_answer_dropped = 0
        self.parts: dict[int, PromptPart] = dict(place(request.parts, self.prompt)) if request.parts else {}
        self.boundaries: Seq[int] = ()
        self.boundary = request.boundary

    @property
    def all_tokens(self) -> Tokens:
        """Return prompt and answer so far: where a paused or preempted job goes on."""
        return np.array(self.tokens, np.int32)

    def inputs(self, p0: int, p1: int) -> Seq[int] | npt.NDArray[Any]:
        """Return what a `Batch` takes of the tokens at positions p0 to p1."""
        return self.tokens[p0:p1]

    def outside_parts(self, n: int) -> int:
        """Return `n`, or where the part begins that cannot be cut and that the first `n` tokens would cut."""
        return next(
            (at for at, part in self.parts.items() if at < n < at + part.n_tokens and not part.can_cut), n
        )

    @property
    def n_cells(self) -> int:
        """Return how many cells all tokens take."""
        return len(self.tokens) + sum(part.n_cells - part.n_tokens for part in self.parts.values())

    @property
    def n_shareable(self) -> int:
        """Return how many tokens are before the first part that others cannot share."""
        return min((at for at, part in self.parts.items() if part.optional), default=len(self.tokens))

    def drop_optional_parts(self) -> None:
        """Have the tokens of parts evaluated that are only a shortcut."""
        self.parts = {at: part for at, part in self.parts.items() if not part.optional}

    def cut_parts(self, n: int) -> None:
        """Note that the first `n` tokens have rows, before any part has begun."""
        left = (part.after(at, n) for at, part in self.parts.items())
        self.parts = dict(filter(None, left))

    @property
    def n_answer(self) -> int:
        return len(self.tokens) - self.n_prompt + self.n_answer_dropped

    @property
    def n_dropped(self) -> int:
        """Return how many tokens do not fit the context, of prompt and answer."""
        return self.gap.n if self.gap is not None else 0

    def leave_out(self, long: LongPrompt, n: int) -> None:
        """Set the prompt to `long` without `n` tokens after its head. Only allowed before it has rows."""
        moved, self.n_left_out = n - self.n_dropped, n
        self.long, self.gap, self.prompt = long, long.gap(n), long.without(n)
        self.tokens = array("i", self.prompt.tobytes())
        self.n_prompt, self.boundaries = len(self.tokens), long.boundaries_without(n)
        self.boundary = max(0, self.boundary - moved)

    def drop(self, begin: int, end: int) -> None:
        """Drop tokens at positions [begin, end) to make room for more of the answer."""
        self.gap = (self.gap or Gap(begin)).wider(self.all_tokens[begin:end])
        of_prompt = max(0, min(end, self.n_prompt) - begin)
        self.prompt = without(self.prompt, begin, of_prompt)
        self.n_prompt -= of_prompt
        self.n_answer_dropped += end - begin - of_prompt
        del self.tokens[begin:end]
        self.boundaries, self.boundary = [], 0


class WorkCounts:
    """Counts what a request took so far.

    Attributes:
        evaluated: the whole prompt was evaluated once.
        n_cached: tokens of the prompt that were not evaluated; None before it has a sequence.
        n_approximate: how many of these have rows that differ from those of an evaluation.
        n_chosen: number of tokens that were chosen, including one that ends the answer.
    """

    def __init__(self) -> None:
        self.evaluated = False
        self.n_cached: int | None = None
        self.n_approximate = 0
        self.cached_tier = ""
        self.exact = True
        self.n_chosen = 0
        self.t_submit = time.perf_counter()
        self.t_start: float | None = None
        self.t_first: float | None = None
        self.t_last: float | None = None
        self.t_end: float | None = None

    @property
    def n_cached_exact(self) -> int:
        return (self.n_cached or 0) - self.n_approximate

    def set_cached(self, n: int) -> None:
        """Note that the first `n` tokens of the prompt had rows already."""
        self.n_cached, self.n_approximate = n, 0 if self.exact else n

    def chose(self, token_time: float) -> None:
        """Add a token that was chosen to the answer."""
        self.n_chosen += 1
        self.t_first, self.t_last = self.t_first or token_time, token_time


class Progress(PromptTokens, WorkCounts):
    """The progress of a request: its tokens, its rows and its counts. After `Engine.submit_jobs` only the
    engine's thread uses it.

    Attributes:
        fits: the prompt was checked and fits the context.
        reuse, accept: whether existing rows may be reused, and which; None is the engine's default.
        least: minimum number of tokens that is worth storing or fetching; 1 for a session, which must be
            kept.
        first: position of the first token that can be evaluated: rows before it must exist.
        most_in_step: how many tokens of the prompt a step evaluates at most.
        most_cut: how many of the last rows of `paused` may be taken away.
        alone: it is evaluated in steps without others until it has chosen a token, since values of a step
            with others were no numbers.
        goes_on: another request continues this one: the rows wait for it, as its `paused`.
        cancelled: set from any thread, read between steps.
        seq: the sequence it has; None while it waits.
        paused: the sequence that holds its rows while it waits.
        n_had: rows that it had when it was paused or preempted.
        save_at: take a checkpoint of the sequence when it has so many tokens, ascending.
        offer: KV of the prompt that was found in a store and is not read yet.
        matched: the best start in the context, and the state of the context when it was looked for.
        fetched: stored rows of the prompt that are loaded, or will be, where the context has fewer.
        method: how rows that were computed elsewhere are repaired; "" where none are used.
    """

    def __init__(self, request: Request) -> None:
        PromptTokens.__init__(self, request)
        WorkCounts.__init__(self)
        self.request, self.tenant = request, request.tenant
        self.reuse = bool(request.reuse) and request.prompt_logprobs is None
        self.accept: Reuse | None = request.reuse if isinstance(request.reuse, str) else None
        self.least = _LEAST if request.session is None else 1
        self.first = self.most_cut = 0
        self.most_in_step: int | None = None
        self.alone = self.goes_on = self.cancelled = self.fits = False

        self.seq: Sequence | None = None
        self.paused: Sequence | None = None
        self.n_had = 0
        self._held_until = 0  # tokens of the answer
        self.save_at: list[int] = []
        self.offer: object | None = None
        self.matched: tuple[object, Any] | None = None
        self.fetched: StoredPrefix | None = None
        self.method = ""

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
        self.seq, self.exact = seq, self.exact and exact
        if self.n_cached is not None:
            return False
        self.set_cached(n_cached)
        if self.is_loading and self.fetched is not None:
            self.cached_tier = self.fetched.tier
        else:
            self.cached_tier = "context" if n_cached else ""
        self.t_start = time.perf_counter()
        return True

    @property
    def n_fetched(self) -> int:
        """Number of the prompt's tokens that have stored rows."""
        return self.fetched.n if self.fetched is not None else 0

    @property
    def is_loading(self) -> bool:
        """True while stored rows are still to be loaded."""
        return self.fetched is not None and not self.fetched.is_loaded

    def import_rows(self, begin: int, part: PromptPart | None, method: str) -> None:
        """Set a part whose rows were computed elsewhere, if some were found, and how they are repaired."""
        self.method = method
        if part is not None:
            self.parts[begin] = part

    def no_imports(self) -> None:
        """Evaluate all tokens."""
        self.drop_optional_parts()
        self.method = ""

    def imported(self, part: PromptPart, n_reused: int) -> None:
        """Note that a part has rows of which `n_reused` were computed elsewhere: nobody else can use them as
        exact ones.
        """
        assert self.seq is not None
        self.seq.tokens.extend(self.tokens[self.n_rows : self.n_rows + part.n_tokens])
        self.seq.stitched, self.seq.chunks = True, self.request.reuse_options
        self.exact = False
        self.n_cached, self.n_approximate = (self.n_cached or 0) + n_reused, self.n_approximate + n_reused
        self.drop_optional_parts()

    @property
    def n_evaluated(self) -> int:
        """Return how many tokens of the prompt were evaluated before the answer began."""
        return self.n_given - self.n_left_out - (self.n_cached or 0)

    def leave_out(self, long: LongPrompt, n: int) -> None:
        super().leave_out(long, n)
        self.fetched = None
        self.no_imports()

    def drop(self, begin: int, end: int) -> None:
        super().drop(begin, end)
        self.save_at = []

    def close(self) -> None:
        """Free what is only needed while the job runs; the numbers stay."""
        self.fetched = self.long = None
        self.drop_optional_parts()
