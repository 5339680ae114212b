"""Events of an answer: pieces of text, then its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mixedkv.engine.sample.sampler import TokenLogprob


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
