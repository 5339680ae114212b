"""Puts the rows of a prefix that was stored into a sequence, and compares those that are unverified first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mixedkv.kv.block import KVBlock
from mixedkv.kv.cache import KVCache
from mixedkv.kv.evaluate_again import Again, Span, evaluate_again


class Unverified(Protocol):
    """Tokens of a prefix to evaluate again before its rows are used."""

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """All tokens of the prefix."""

    @property
    def spans(self) -> Sequence[Span]: ...

    def verify(self, again: Again) -> str:
        """Return what is wrong with the rows; "" if nothing is."""


class WrongRowsError(ValueError):
    """Rows are not those that the model computes."""


class Fetched:
    """Rows of a prefix, to be loaded into an empty sequence a block at a time, so that a long prefix is
    spread over several steps.

    Unverified tokens are evaluated again in place, behind the rows before them. The blocks are then loaded
    once more, so that the sequence is to the bit what was stored.

    Args:
        blocks: of consecutive ranges from position 0 on.
        tier: where they came from.
        exact: the sequence can be gone on from exactly.
        unverified: None, or one without spans, where the rows are believed.
    """

    def __init__(
        self, blocks: list[KVBlock], tier: str, exact: bool, unverified: Unverified | None = None
    ) -> None:
        self.n, self.tier, self.exact = sum(len(block.tokens) for block in blocks), tier, exact
        self.unverified = unverified if unverified is not None and unverified.spans else None
        self._todo, self._all = list(blocks), blocks if self.unverified is not None else []

    @property
    def is_loaded(self) -> bool:
        return not self._todo and self.unverified is None

    def advance(self, kv: KVCache, seq: int) -> KVBlock | None:
        """Load the next block and return it. After the last one, compare; the sequence is then emptied, and
        None returned.

        Raises:
            WrongRowsError: the rows are not the model's.
            ValueError, LookupError: the cache refuses them. In all cases the sequence is empty.
        """
        try:
            if self._todo:
                block = self._todo.pop(0)
                kv.load(block, seq, more=bool(self._todo))
                return block
            unverified, self.unverified = self.unverified, None
            assert unverified is not None
            problem = unverified.verify(evaluate_again(kv, seq, unverified.tokens, unverified.spans))
        except BaseException:
            kv.remove(seq)
            raise
        kv.remove(seq)
        if problem:
            raise WrongRowsError(problem)
        self._todo, self._all = self._all, []
        return None
