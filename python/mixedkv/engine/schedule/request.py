"""A caller's request to the engine: plain data, which nothing here changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from mixedkv.engine.sample.sampling import Sampling
from mixedkv.engine.text.answer_reader import AnswerReader
from mixedkv.engine.text.thought import ThoughtTags
from mixedkv.limits import check_int
from mixedkv.prefix.sequences import Reuse
from mixedkv.prompts.overflow import Overflow
from mixedkv.prompts.part import GivenPart
from mixedkv.tokens import Tokens


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """A prompt to evaluate and an answer to generate.

    Attributes:
        prompt: token ids, at least one; ids of `parts` are negative.
        max_tokens: maximum length of the answer; 0 only evaluates the prompt.
        sampling: how the answer's tokens are chosen; None only where none is chosen.
        tenant: whose request it is; rows are shared within a tenant only.
        session: the store files the KV under this name.
        stop: strings that end the answer.
        stop_tokens: tokens that end the answer, beside the model's own.
        min_tokens: the answer does not end by a token before it has so many.
        ignore_end: the model's own end tokens do not end the answer.
        n_indent: the answer ends where a line, but the first, begins with fewer spaces and tabs; 0 for any.
        max_seconds: after its first token; the answer ends with the line in which they are over. None: never.
        stream: deliver text while it is generated, instead of all of it at the end.
        n_logprobs: how many of the likeliest tokens to tell with each token; None for no logprobs.
        post_sampling: log probabilities are of what the samplers left to draw from, not of the model's own
            distribution.
        prompt_logprobs: the same for the prompt's tokens; the whole prompt is then evaluated.
        shown: control tokens whose names are part of the answer.
        thoughts: how the model marks its thoughts; None for a model that does not think.
        thought_budget: tokens after which a thought is closed.
        triggers: words that begin a call; `sampling.constraint` applies from such a word on.
        said: the beginning of the answer, with which the prompt ends: `sampling.constraint` is for the whole.
        reader: makes what reads the answer's text, thoughts and calls in it.
        boundary: how many of the prompt's tokens the prompt of the next turn will begin with, since templates
            leave thoughts out of the history; 0 for all.
        reuse: which existing rows the prompt starts from, see `Reuse`; True is the engine's default, False
            evaluates everything.
        reuse_options: how rows that were computed elsewhere are found and repaired, in terms of the engine's
            connector, which checks them; None is its own way.
        store: keep the KV after the answer, in the context and in the store, if there is one.
        keep: keep the rows as a prefix for other requests.
        overflow: "slide" drops the middle of what does not fit the context, of the prompt and during the
            answer; "refuse" takes no such prompt and ends the answer.
        speculation: how the answer is drafted: "off", or a mode of `draft.sources`; None is the engine's
            default.
        prediction: a text that the answer may contain; where it does, tokens are checked instead of
            generated.
        parts: what stands in the prompt besides tokens, in order: see `prompts.part`.
        message_ends: ids of messages in the prompt, and how many tokens it has up to the end of each.

    Raises:
        TypeError: `max_tokens` or `n_logprobs` is no whole number.
        ValueError: `reuse`, `overflow`, `max_tokens` or `n_logprobs` has no such value.
    """

    prompt: Tokens | Sequence[int]
    max_tokens: int
    sampling: Sampling | None = None
    tenant: str = ""
    session: str | None = None
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    min_tokens: int = 0
    ignore_end: bool = False
    n_indent: int = 0
    max_seconds: float | None = None
    stream: bool = False
    n_logprobs: int | None = None
    post_sampling: bool = False
    prompt_logprobs: int | None = None
    shown: Sequence[int] = ()
    thoughts: ThoughtTags | None = None
    thought_budget: int | None = None
    triggers: Sequence[str] = ()
    said: str = ""
    reader: Callable[[], AnswerReader] = AnswerReader
    boundary: int = 0
    reuse: bool | Reuse = True
    reuse_options: object | None = None
    store: bool = True
    keep: bool = False
    overflow: Overflow = "refuse"
    speculation: str | None = None
    prediction: str = ""
    parts: Sequence[GivenPart] = ()
    message_ends: Sequence[tuple[str, int]] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.reuse, bool) and self.reuse not in get_args(Reuse):
            raise ValueError(f"reuse={self.reuse!r}: use True, False, or one of {', '.join(get_args(Reuse))}")
        check_int("max_tokens", self.max_tokens, 0)
        if self.n_logprobs is not None:
            check_int("n_logprobs", self.n_logprobs, 0)
        if self.overflow not in get_args(Overflow):
            raise ValueError(f"overflow={self.overflow!r}: use one of {', '.join(get_args(Overflow))}")
        object.__setattr__(self, "prompt", np.asarray(self.prompt, np.int32))

    @property
    def greedy(self) -> bool:
        """True if the same logits give the same token."""
        return self.sampling is not None and self.sampling.greedy

    @property
    def slides(self) -> bool:
        """True if the middle of the request may be dropped to fit the context, which has tokens alone."""
        return self.overflow == "slide" and not self.parts
