"""A request at work in an engine: `Progress`, which the scheduler sees, and the state of its answer."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from mixedkv.constrain.constraint import Matcher
from mixedkv.engine.jobs.drafter import Drafter
from mixedkv.engine.sample.sampler import PromptLogprobs, Sampler, TokenLogprob
from mixedkv.engine.schedule.progress import Progress
from mixedkv.engine.schedule.request import Request
from mixedkv.engine.text.thought import Thought
from mixedkv.native.detokenizer import TextStream
from mixedkv.prefix.sequences import Sequence


class AnswerState:
    """One answer to a request.

    Args:
        sampler: chooses tokens; None if the job generates none.
        thought: follows the answer of a model that thinks.
        trigger: follows an answer that may call a tool, and constrains the call.
        drafter: guesses what comes next, so that several tokens can be evaluated in a step.
        prompt_logprobs: gathers the log probabilities of the prompt.
    """

    def __init__(
        self,
        request: Request,
        sampler: Sampler | None = None,
        *,
        thought: Thought | None = None,
        trigger: CallTrigger | None = None,
        drafter: Drafter | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        self.request, self.sampler = request, sampler
        self.thought, self.trigger, self.drafter = thought, trigger, drafter
        self.prompt_logprobs = prompt_logprobs
        self.shown, self.stop_tokens = frozenset(request.shown), frozenset(request.stop_tokens)
        self.text = TextStream(request.stop, request.n_indent)
        self.tokens = array("i")
        self._n_delivered = 0  # of the tokens
        self.has_new_line = self.late = False
        self._texts: list[str] = []
        self._logprobs: list[tuple[int, TokenLogprob]] = []  # with the character where the token starts

    @property
    def n_thought(self) -> int:
        """Number of tokens so far that belong to thoughts."""
        return self.thought.n_tokens if self.thought is not None else 0

    def add(self, token: int, token_bytes: bytes, logprob: TokenLogprob | None) -> Delta | None:
        """Add a token and its text; return what can be delivered now, if anything."""
        self.tokens.append(token)
        self.has_new_line = self.has_new_line or b"\n" in token_bytes
        start = self.text.n_seen
        released = self.text.feed(token_bytes)
        if logprob is not None:
            self._logprobs.append((start, logprob))
        if not self.request.stream:
            self._texts.append(released)
            return None
        if not released:
            return None
        begin, self._n_delivered = self._n_delivered, len(self.tokens)
        return Delta(released, self._certain_logprobs(), self.tokens[begin:])

    def out_of_time(self, token_bytes: bytes, seconds: float) -> bool:
        """Return whether the answer ends with the line that a token ends, having taken so long."""
        most = self.request.max_seconds
        self.late = most is not None and seconds > most and b"\n" in token_bytes
        return self.late

    def end_by(self, logprob: TokenLogprob) -> None:
        """Note the token that ends the answer, which has no text. Who scores a prompt counts on it."""
        self._logprobs.append((self.text.n_seen, logprob))

    def finish(self, reason: str) -> Done:
        """End the answer; return what was not delivered yet."""
        rest = self.text.finish()
        if self.text.stopped:
            self._logprobs = [entry for entry in self._logprobs if entry[0] < self.text.n_released]
        return Done(reason, "".join([*self._texts, rest]), tuple(each for _, each in self._logprobs))

    def _certain_logprobs(self) -> tuple[TokenLogprob, ...]:
        certain = tuple(each for start, each in self._logprobs if start < self.text.n_released)
        del self._logprobs[: len(certain)]
        return certain


class CallTrigger:
    """Follows one answer token by token, up to its first call.

    Args:
        words: each of them begins a call.
        matcher: matcher of calls from that word on, used by this answer alone.
    """

    def __init__(self, words: Seq[str], matcher: Matcher) -> None:
        self._words = tuple(word.encode("utf-8") for word in words)
        self._keep = max(map(len, self._words))
        self._matcher: Matcher | None = matcher
        self._text = b""

    def take(self, token_bytes: bytes) -> Matcher | None:
        """Add the text of the answer's next token. If a call begins in it, return the matcher for the text
        that follows.

        If the rest of the token does not match any known call, the answer stays unconstrained.
        """
        if self._matcher is None:
            return None
        self._text += token_bytes
        begin = min((at for word in self._words if (at := self._text.find(word)) >= 0), default=-1)
        if begin < 0:
            self._text = self._text[-self._keep :]
            return None
        matcher, self._matcher = self._matcher, None
        return matcher if matcher.follow(self._text[begin:]) else None


@dataclass(frozen=True, slots=True)
class Delta:
    """The next text chunk of an answer, with the log probabilities of the tokens that end in it. `tokens`
    are those that were chosen since the chunk before.
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    tokens: Seq[int] = ()
    last: ClassVar = False


@dataclass(frozen=True, slots=True)
class Done:
    """The end of an answer, with the text that was not delivered yet.

    `reason` is OpenAI's finish_reason: "stop", or "length" when max_tokens or the context is used up.
    """

    reason: str
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    last: ClassVar = True


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer cannot be finished."""

    error: Exception


Event = Delta | Done | Failed

_T = TypeVar("_T")


class _Number(Generic[_T]):
    """A number of `Job.work`, for who reads what an answer took."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, job: Job, owner: object) -> _T:
        value: _T = getattr(job.work, self._name)
        return value


class Job(Progress):
    """A request being answered: the progress of its prompt, and the state of its answer.

    Args:
        answer: None for a request that only evaluates its prompt.
        deliver: gets the events in order, the last one a `Done` or a `Failed`.

    Attributes:
        message_id: id under which the stored KV of the answer is found; "" for none.
        is_stored: what was computed of it goes into the store.
        n_stored, store_problem: tokens that were newly stored, and why others were not, or not read.
        import_report: what the connector says of rows that were computed elsewhere.
        n_cached, exact, t_first, ...: numbers of `work`, see `WorkCounts`.
    """

    n_cached, n_cached_exact, n_approximate = _Number[int | None](), _Number[int](), _Number[int]()
    cached_tier, exact, method = _Number[str](), _Number[bool](), _Number[str]()
    evaluated, n_chosen, t_submit = _Number[bool](), _Number[int](), _Number[float]()
    t_start, t_first = _Number[float | None](), _Number[float | None]()
    t_last, t_end = _Number[float | None](), _Number[float | None]()

    def __init__(
        self,
        request: Request,
        answer: AnswerState | None = None,
        deliver: Callable[[Event], None] = lambda event: None,
    ) -> None:
        super().__init__(request)
        self.message_id = self.store_problem = ""
        self.n_stored, self.is_stored = 0, True
        self.import_report: object | None = None
        self.deliver = deliver
        self.answer_by(answer or AnswerState(request))

    def answer_by(self, answer: AnswerState) -> None:
        """Set the state of the answer. Only before work begins."""
        self.answer = answer
        if answer.prompt_logprobs is not None:
            self.most_in_step = answer.prompt_logprobs.most

    @property
    def n_thought(self) -> int:
        """Number of tokens of the answer that belong to thoughts. The token that ends an answer is none."""
        return min(self.answer.n_thought, self.n_answer)

    def begin(self, seq: Sequence, n_cached: int, exact: bool) -> bool:
        is_first = super().begin(seq, n_cached, exact)
        if is_first and self.answer.sampler is not None:
            sampler = self.answer.sampler
            latest = self.prompt[-sampler.n_prompt :] if sampler.n_prompt else self.prompt[:0]
            sampler.accept_prompt(latest[latest >= 0].tolist())
        return is_first

    def store_failed(self, error: Exception) -> None:
        """Note why the job goes on, or has ended, without what is stored."""
        self.store_problem = str(error) or type(error).__name__

    def finish(self, reason: str) -> Done:
        self.work.t_end = time.perf_counter()
        return self.answer.finish(reason)

    def close(self) -> None:
        super().close()
        if self.answer.sampler is not None:
            self.answer.sampler.close()
