"""One answer to one prompt, as the engine works on it."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from mixedkv.chunks.chunk_reuse import Reuse
from mixedkv.chunks.repair import Method
from mixedkv.chunks.stitch import Rows, Stitch
from mixedkv.engine.constrain.call_trigger import CallTrigger
from mixedkv.engine.sample.prompt_logprobs import PromptLogprobs
from mixedkv.engine.sample.sampler import Sampler, TokenLogprob
from mixedkv.engine.schedule.drafter import Drafter
from mixedkv.engine.schedule.sequences import Sequence
from mixedkv.engine.text.detokenizer import TextStream
from mixedkv.engine.text.thought import Thought
from mixedkv.images import Picture, place
from mixedkv.llama import Llama
from mixedkv.prompts.overflow import Gap, LongPrompt, Overflow, without
from mixedkv.store.recheck import Doubt
from mixedkv.tokens import Tokens


@dataclass(frozen=True, slots=True)
class Delta:
    """Text that is certain, and the tokens that end in it."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The end of an answer, with what of its text was not delivered yet.

    `reason` is OpenAI's finish_reason: "stop", or "length" when max_tokens or the context is used up.
    """

    reason: str
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer cannot be finished."""

    error: Exception


Event = Delta | Done | Failed


class Job:
    """A prompt to evaluate and an answer to generate. After `Engine.submit` the engine's thread owns it;
    `deliver` gets its events in order, the last one a `Done` or a `Failed`.

    Args:
        prompt: token ids, at least one; those of pictures are theirs.
        pictures: that are in it.
        max_tokens: of the answer; 0 only evaluates the prompt.
        sampler: None only with max_tokens=0.
        stop: strings that end the answer.
        stream: deliver text as it comes, else all of it with the end.
        n_logprobs: None for no logprobs, else how many of the likeliest tokens to tell.
        reuse: which rows that are there it starts from, see `Reuse`: "exact", "prefix" or "chunks"; True as
            the engine does by default; False evaluates everything.
        store: keep the KV after the answer, in the context and in the store, if there is one.
        keep: the rows stay as a prefix that others start from.
        session: what the store files the KV under.
        shown: control tokens whose names are part of the answer.
        min_tokens: of the answer before it may end by a token.
        stop_tokens: tokens that end the answer, beside the model's own.
        thought: follows the answer of a model that thinks.
        trigger: follows an answer that may call: a call is constrained.
        boundary: tokens of the prompt that a later turn's begins with too, where thoughts are left out of the
            history; 0 for all of them.
        drafter: guesses what comes next, so that several tokens can be evaluated in a step.
        prompt_logprobs: takes those of the prompt, all of which is then evaluated.
        overflow: "slide" drops the middle of what does not fit the context, of the prompt and during the
            answer; "refuse" takes no such prompt and ends the answer.
    """

    def __init__(
        self,
        prompt: Seq[int] | Tokens,
        *,
        max_tokens: int,
        sampler: Sampler | None,
        tenant: str = "",
        stop: Seq[str] = (),
        stream: bool = False,
        n_logprobs: int | None = None,
        ignore_end: bool = False,
        reuse: bool | Reuse = True,
        store: bool = True,
        keep: bool = False,
        session: str | None = None,
        shown: Seq[int] = (),
        min_tokens: int = 0,
        stop_tokens: Seq[int] = (),
        thought: Thought | None = None,
        trigger: CallTrigger | None = None,
        boundary: int = 0,
        drafter: Drafter | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
        overflow: Overflow = "refuse",
        pictures: Seq[Picture] = (),
        deliver: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.prompt: Tokens = np.asarray(prompt, dtype=np.int32)
        self.tenant, self.session = tenant, session
        self.max_tokens, self.sampler = max_tokens, sampler
        self.stream, self.n_logprobs, self.ignore_end = stream, n_logprobs, ignore_end
        if not isinstance(reuse, bool) and reuse not in get_args(Reuse):
            raise ValueError(f"reuse={reuse!r}: use True, False, or one of {', '.join(get_args(Reuse))}")
        if n_logprobs is not None and n_logprobs < 0:
            raise ValueError(f"n_logprobs={n_logprobs}: use 0 or more, or None for none")
        self.prompt_logprobs = prompt_logprobs
        self.reuse, self.store, self.keep = bool(reuse) and prompt_logprobs is None, store, keep
        self.accept: Reuse | None = reuse if isinstance(reuse, str) else None  # None: the engine's default
        self.min_tokens, self.stop_tokens = min_tokens, frozenset(stop_tokens)
        self.shown = frozenset(shown)
        self.thought, self.trigger, self.boundary, self.drafter = thought, trigger, boundary, drafter
        self.deliver = deliver
        self.first = 0  # position of the first token that can be evaluated: rows before it must be there
        self.most_cut = 0  # of the last rows of `paused` that are not this job's
        self.goes_on = False  # another job does: the rows wait for it, as its `paused`
        self.cancelled = False  # set from any thread, read between steps

        if overflow not in get_args(Overflow):
            raise ValueError(f"overflow={overflow!r}: use one of {', '.join(get_args(Overflow))}")
        self.slides = overflow == "slide" and not pictures
        self.long: LongPrompt | None = None  # where the prompt does not fit, all of it
        self.gap: Gap | None = None  # what is missing in `tokens`, and in `prompt`
        self.n_left_out = self.n_answer_dropped = 0  # tokens of it before work began, and of the answer

        self.pictures = place(pictures, self.prompt) if pictures else {}
        self.tokens = array("i", self.prompt.tobytes())  # prompt and answer
        self.n_prompt = self.n_given = len(self.tokens)  # tokens of the prompt, and when nothing was dropped
        self.seq: Sequence | None = None
        self.paused: Sequence | None = None  # what holds its rows while it has no place
        self.boundaries: Seq[int] = ()  # where messages of the prompt begin and end
        self.save_at: list[int] = []  # take a checkpoint of the sequence when it is this long, ascending
        self.text = TextStream(stop)
        self.answer: list[str] = []
        self.logprobs: list[tuple[int, TokenLogprob]] = []  # with the character where the token starts
        self.blocks: list[Any] = []  # from the store, still to be loaded
        self.doubt: Doubt | None = None  # what of them is compared with the model first
        self.n_fetched = 0  # tokens they cover
        self.blocks_exact = True
        self.n_in_context: int | None = None  # as it was when the store was asked
        self.passages: Rows = []  # of passages behind the exact beginning, still to be loaded
        self.method: Method | None = None  # how they are repaired
        self.stitch: Stitch | None = None  # at work on them

        self.evaluated = False  # the whole prompt, once
        self.n_cached: int | None = None  # tokens of the prompt that were not evaluated
        self.n_approximate = 0  # of these the ones whose rows are not those of an evaluation
        self.cached_tier = ""
        self.exact = True
        self.t_submit = time.perf_counter()
        self.t_start: float | None = None
        self.t_first: float | None = None
        self.t_last: float | None = None
        self.t_end: float | None = None

    @property
    def n_rows(self) -> int:
        """Tokens that have rows."""
        return len(self.seq.tokens) if self.seq is not None else 0

    @property
    def n_remaining(self) -> int:
        """Tokens to evaluate before the next one can be chosen."""
        return len(self.tokens) - self.n_rows

    @property
    def all_tokens(self) -> Tokens:
        """Prompt and answer so far: where a paused or preempted job goes on."""
        return np.array(self.tokens, np.int32)

    def inputs(self, p0: int, p1: int) -> Seq[int] | npt.NDArray[Any]:
        """What a `Batch` takes of the tokens at positions p0 to p1."""
        return self.tokens[p0:p1]

    def save_also(self, n: int) -> None:
        """Take a checkpoint after `n` tokens too."""
        self.save_at = sorted({*self.save_at, n})

    @property
    def n_plain(self) -> int:
        """Tokens before the first passage: those that are evaluated one after the other, exactly."""
        return self.passages[0][0].begin if self.passages else len(self.tokens)

    @property
    def at_passages(self) -> bool:
        """What comes next is not evaluated plainly."""
        return bool(self.passages) and self.n_rows >= self.n_plain

    @property
    def n_to_do(self) -> int:
        """About how many tokens are still to be evaluated."""
        return self.stitch.n_left if self.stitch is not None else self.n_remaining

    @property
    def n_cached_exact(self) -> int:
        return (self.n_cached or 0) - self.n_approximate

    def up_to_checkpoint(self, n: int) -> int:
        """Of the next `n` tokens those before the next checkpoint, or the first passage."""
        if self.prompt_logprobs is not None:
            n = min(n, self.prompt_logprobs.most)
        left = next((at - self.n_rows for at in self.save_at if at > self.n_rows), n)
        seen = next((at - self.n_rows for at in self.pictures if at > self.n_rows), n)
        return min(n, left, seen, self.n_plain - self.n_rows)

    @property
    def picture(self) -> Picture | None:
        """That comes next."""
        return self.pictures.get(self.n_rows)

    def outside_pictures(self, n: int) -> int:
        """The first `n` tokens of the prompt without the part of a picture that is at their end."""
        return next((at for at, picture in self.pictures.items() if at < n < at + len(picture.ids)), n)

    @property
    def n_cells(self) -> int:
        """Rows of all tokens: where time, row and column of a picture's are apart, it has more of them than
        positions.
        """
        return len(self.tokens) + sum(
            max(0, len(picture) - len(picture.ids)) for picture in self.pictures.values()
        )

    def begin(self, seq: Sequence, n_cached: int) -> bool:
        """Have a sequence with `n_cached` tokens of the prompt in it; whether it is the first, so not after a
        pause or a preemption.
        """
        self.seq, self.exact = seq, self.exact and seq.exact
        if self.n_cached is not None:
            return False
        self.set_cached(n_cached)
        if not self.blocks:
            self.cached_tier = "context" if n_cached else ""
        self.t_start = time.perf_counter()
        if self.sampler is not None:
            latest = self.prompt[-64:]
            self.sampler.accept_prompt(latest[latest >= 0].tolist())
        return True

    def set_cached(self, n: int) -> None:
        """The first `n` tokens of the prompt have rows that were there."""
        self.n_cached, self.n_approximate = n, 0 if self.exact else n

    def set_blocks(self, blocks: list[Any], tier: str, exact: bool, doubt: Doubt | None = None) -> None:
        """Rows from the store, to be used if the context has fewer; `doubt`: to be compared first."""
        self.doubt = doubt
        self.blocks, self.cached_tier, self.blocks_exact = blocks, tier, exact
        self.n_fetched = sum(len(block.tokens) for block in blocks)

    def forget_blocks(self) -> None:
        self.blocks, self.n_fetched, self.doubt = [], 0, None

    def set_passages(self, rows: Rows, method: Method | None) -> None:
        """Rows from elsewhere for passages of the prompt, in order; none are left where it is empty."""
        self.passages, self.method, self.stitch = rows, method, None

    def begin_stitch(self, llm: Llama) -> Stitch:
        """All before the first passage has rows."""
        assert self.seq is not None
        assert self.method is not None
        self.stitch = Stitch(llm, self.prompt, self.passages, self.n_rows, self.method, self.seq.id)
        return self.stitch

    def stitched(self) -> None:
        """The prompt has rows, but for its last token."""
        assert self.seq is not None
        assert self.stitch is not None
        self.seq.tokens.extend(self.prompt[self.n_rows : -1].tolist())
        self.seq.exact, self.seq.stitched = False, True
        self.exact = False
        n = int(self.stitch.kept.sum())
        self.n_cached, self.n_approximate = (self.n_cached or 0) + n, self.n_approximate + n
        self.passages, self.stitch = [], None

    @property
    def n_answer(self) -> int:
        return len(self.tokens) - self.n_prompt + self.n_answer_dropped

    @property
    def n_dropped(self) -> int:
        """Tokens that do not fit the context, of prompt and answer."""
        return self.gap.n if self.gap is not None else 0

    @property
    def n_evaluated(self) -> int:
        """Tokens of the prompt that were evaluated before the answer began."""
        return self.n_given - self.n_left_out - (self.n_cached or 0)

    def leave_out(self, long: LongPrompt, n: int) -> None:
        """The prompt is `long` without `n` tokens behind its head. Not once it has rows."""
        moved, self.n_left_out = n - self.n_dropped, n
        self.long, self.gap, self.prompt = long, long.gap(n), long.without(n)
        self.tokens = array("i", self.prompt.tobytes())
        self.n_prompt, self.boundaries = len(self.tokens), long.boundaries_without(n)
        self.boundary = max(0, self.boundary - moved)
        self.forget_blocks()
        self.set_passages([], None)

    def drop(self, begin: int, end: int) -> None:
        """Tokens at positions [begin, end) make room for more of the answer."""
        self.gap = (self.gap or Gap(begin)).wider(self.all_tokens[begin:end])
        of_prompt = max(0, min(end, self.n_prompt) - begin)
        self.prompt = without(self.prompt, begin, of_prompt)
        self.n_prompt -= of_prompt
        self.n_answer_dropped += end - begin - of_prompt
        del self.tokens[begin:end]
        self.save_at, self.boundaries, self.boundary = [], [], 0

    def take(self, piece: bytes, logprob: TokenLogprob | None) -> Delta | None:
        """Add a token's text to the answer; what can be released, if anything is."""
        start = self.text.n_seen
        released = self.text.feed(piece)
        if logprob is not None:
            self.logprobs.append((start, logprob))
        if not self.stream:
            self.answer.append(released)
            return None
        if not released:
            return None
        return Delta(released, self._certain_logprobs())

    def finish(self, reason: str) -> Done:
        self.t_end = time.perf_counter()
        rest = self.text.finish()
        if self.text.stopped:
            self.logprobs = [entry for entry in self.logprobs if entry[0] < self.text.n_released]
        logprobs = tuple(logprob for _, logprob in self.logprobs)
        return Done(reason, "".join([*self.answer, rest]), logprobs)

    def close(self) -> None:
        self.blocks, self.passages, self.stitch, self.long = [], [], None, None
        if self.sampler is not None:
            self.sampler.close()

    def _certain_logprobs(self) -> tuple[TokenLogprob, ...]:
        certain = tuple(lp for start, lp in self.logprobs if start < self.text.n_released)
        del self.logprobs[: len(certain)]
        return certain
