"""Parts of prompts for a scheduler without a model: one that is evaluated whole, and one in slices."""

from __future__ import annotations

import random
from typing import ClassVar, Protocol

import numpy as np

from mixedkv.prompts.part import Outcome
from mixedkv.tokens import Tokens


class Room(Protocol):
    """Cells, as `scheduler_support.Cells`, and how many there are."""

    n_ctx: int
    used: int

    def evaluate(self, seq: int, p0: int, n: int, more: int = 0) -> None: ...


class WholePart:
    """As an image: ids below zero, evaluated in one piece, with `more` cells than positions."""

    kind: ClassVar[str] = "whole"
    can_cut: ClassVar[bool] = False
    optional: ClassVar[bool] = False
    n_left: ClassVar[None] = None

    def __init__(self, ids: Tokens, more: int = 0) -> None:
        self.ids, self._more = ids, more

    @property
    def n_tokens(self) -> int:
        return len(self.ids)

    @property
    def n_cells(self) -> int:
        return len(self.ids) + self._more

    def budget(self, n: int) -> int | None:
        return self.n_cells if n else None

    def after(self, begin: int, n: int) -> tuple[int, WholePart]:
        return begin, self

    def evaluate(self, cells: Room, prompt: Tokens, begin: int, seq: int, n: int) -> Outcome:
        assert np.array_equal(prompt[begin : begin + self.n_tokens], self.ids)
        if cells.used + self.n_cells > cells.n_ctx:
            return Outcome("no cells")
        cells.evaluate(seq, begin, self.n_tokens, more=self._more)
        return Outcome("done")


class SlicedPart:
    """As reused chunks: the rest of a prompt but its last token, evaluated in slices. Where one fails, the
    tokens are evaluated instead.
    """

    kind: ClassVar[str] = "sliced"
    can_cut: ClassVar[bool] = True
    optional: ClassVar[bool] = True

    def __init__(self, n_tokens: int, chance: random.Random) -> None:
        self.n_tokens, self._chance = n_tokens, chance
        self.n_left: int | None = None

    @property
    def n_cells(self) -> int:
        return self.n_tokens

    def budget(self, n: int) -> int:
        return n

    def after(self, begin: int, n: int) -> tuple[int, SlicedPart] | None:
        assert self.n_left is None, "it has begun already"
        lost = max(0, n - begin)
        return (
            (begin + lost, SlicedPart(self.n_tokens - lost, self._chance)) if lost < self.n_tokens else None
        )

    def evaluate(self, cells: Room, prompt: Tokens, begin: int, seq: int, n: int) -> Outcome:
        left = self.n_tokens if self.n_left is None else self.n_left
        some = min(max(1, n), left)
        if cells.used + some > cells.n_ctx or self._chance.random() < 0.02:
            return Outcome("given up", error=LookupError("there is no room"))
        cells.evaluate(seq, begin + self.n_tokens - left, some)
        self.n_left = left - some
        if self.n_left:
            return Outcome("goes on")
        return Outcome("done", n_reused=self.n_tokens // 2)
