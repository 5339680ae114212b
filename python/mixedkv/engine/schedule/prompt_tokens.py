"""The tokens of a request, and the parts of its prompt that are no tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt

from mixedkv.engine.schedule.request import Request
from mixedkv.prompts.overflow import DroppedTokens, LongPrompt, without
from mixedkv.prompts.part import PromptPart, place
from mixedkv.tokens import Tokens


class PromptTokens:
    """The tokens of a request's prompt and answer, without those that do not fit the context.

    Attributes:
        prompt: the request's, without what was left out.
        tokens: prompt and answer.
        n_prompt, n_given: tokens of the prompt, and of the request's prompt.
        long: where the prompt does not fit, all of it.
        dropped_tokens: what is missing in `tokens`, and in `prompt`.
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
        self.dropped_tokens: DroppedTokens | None = None
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
        return self.dropped_tokens.n if self.dropped_tokens is not None else 0

    def leave_out(self, long: LongPrompt, n: int) -> None:
        """Set the prompt to `long` without `n` tokens after its head. Only allowed before it has rows."""
        moved, self.n_left_out = n - self.n_dropped, n
        self.long, self.dropped_tokens, self.prompt = long, long.dropped_tokens(n), long.without(n)
        self.tokens = array("i", self.prompt.tobytes())
        self.n_prompt, self.boundaries = len(self.tokens), long.boundaries_without(n)
        self.boundary = max(0, self.boundary - moved)

    def drop(self, begin: int, end: int) -> None:
        """Drop tokens at positions [begin, end) to make room for more of the answer."""
        self.dropped_tokens = (self.dropped_tokens or DroppedTokens(begin)).wider(self.all_tokens[begin:end])
        of_prompt = max(0, min(end, self.n_prompt) - begin)
        self.prompt = without(self.prompt, begin, of_prompt)
        self.n_prompt -= of_prompt
        self.n_answer_dropped += end - begin - of_prompt
        del self.tokens[begin:end]
        self.boundaries, self.boundary = [], 0
