"""Remembers whose tokens sequence 0 of a `Llama` holds, as callers with different tenants share it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from mixedkv.tokens import common_prefix

if TYPE_CHECKING:
    from mixedkv.llama import Llama


@dataclass(eq=False, slots=True)
class _Left:
    """The owner of sequence 0, and what was left in it; None while its work is under way."""

    owner: bytes
    tokens: npt.NDArray[np.intc] | None = None


# By `Llama`, not by caller: the next caller must know whose tokens are in its sequence.
_left: WeakKeyDictionary[Llama, _Left] = WeakKeyDictionary()


class Claim:
    """A caller's right to use sequence 0, until another one claims it.

    Tokens that were left for the same owner stay; those of any other owner are dropped.

    Args:
        llm: the `Llama` whose sequence it is.
        owner: the owner that claims it.
        untouched: also drop the sequence if tokens were evaluated after it was left.

    Attributes:
        goes_on: the sequence was not emptied.
    """

    def __init__(self, llm: Llama, owner: bytes, *, untouched: bool) -> None:
        self._llm, last = llm, _left.get(llm)
        self._mine = _left[llm] = _Left(owner)
        self.goes_on = last is not None and last.owner == owner and self._is_there(last.tokens, untouched)
        if not self.goes_on:
            llm.kv.remove(0)

    @property
    def holds(self) -> bool:
        """True until another owner claims the sequence."""
        return _left.get(self._llm) is self._mine

    def leave(self) -> None:
        """Leave the sequence as it is for the next claim of the same owner."""
        self._mine.tokens = self._llm.input_ids[: self._llm.n_tokens].copy()

    def _is_there(self, left: npt.NDArray[np.intc] | None, untouched: bool) -> bool:
        held = self._llm.input_ids[: self._llm.n_tokens]
        if left is None or (untouched and len(left) != len(held)):
            return False
        return common_prefix(left, held) == min(len(left), len(held))
