"""The state of one answer: its sampler, what follows its text, and the events it is delivered as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mixedkv.engine.constrain.constraint import Matcher
from mixedkv.engine.jobs.drafter import Drafter
from mixedkv.engine.sample.sampler import PromptLogprobs, Sampler, TokenLogprob
from mixedkv.engine.schedule.request import Request
from mixedkv.engine.text.detokenizer import TextStream
from mixedkv.engine.text.thought import Thought


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
        self.text = TextStream(request.stop)
        self._pieces: list[str] = []
        self._logprobs: list[tuple[int, TokenLogprob]] = []  # with the character where the token starts

    def add(self, piece: bytes, logprob: TokenLogprob | None) -> Delta | None:
        """Add a token's text; return what can be delivered now, if anything."""
        start = self.text.n_seen
        released = self.text.feed(piece)
        if logprob is not None:
            self._logprobs.append((start, logprob))
        if not self.request.stream:
            self._pieces.append(released)
            return None
        return Delta(released, self._certain_logprobs()) if released else None

    def end_by(self, logprob: TokenLogprob) -> None:
        """Note the token that ends the answer, which has no text. Who scores a prompt counts on it."""
        self._logprobs.append((self.text.n_seen, logprob))

    def finish(self, reason: str) -> Done:
        """End the answer; return what was not delivered yet."""
        rest = self.text.finish()
        if self.text.stopped:
            self._logprobs = [entry for entry in self._logprobs if entry[0] < self.text.n_released]
        return Done(reason, "".join([*self._pieces, rest]), tuple(each for _, each in self._logprobs))

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

    def __init__(self, words: Sequence[str], matcher: Matcher) -> None:
        self._words = tuple(word.encode("utf-8") for word in words)
        self._keep = max(map(len, self._words))
        self._matcher: Matcher | None = matcher
        self._text = b""

    def take(self, piece: bytes) -> Matcher | None:
        """Add the text of the answer's next token. If a call begins in it, return the matcher for the text
        that follows.

        If the rest of the token does not match any known call, the answer stays unconstrained.
        """
        if self._matcher is None:
            return None
        self._text += piece
        begin = min((at for word in self._words if (at := self._text.find(word)) >= 0), default=-1)
        if begin < 0:
            self._text = self._text[-self._keep :]
            return None
        matcher, self._matcher = self._matcher, None
        return matcher if matcher.follow(self._text[begin:]) else None


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of an answer's text, and the tokens that end in it."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
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
