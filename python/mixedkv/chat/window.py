"""A sequence longer than its context: the first tokens and the latest stay, the middle is dropped, as
`mixedkv.prompts.overflow` says.

What stays keeps its KV; its positions close up (llama.cpp's context shift). Such KV was computed with the
dropped tokens in sight, so it is that of no prompt, and is never stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from mixedkv.kv.close_gap import close_gap
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.prompts.message_starts import message_starts
from mixedkv.prompts.overflow import budget, cut
from mixedkv.store.live_owner import Claim
from mixedkv.tokens import common_prefix

if TYPE_CHECKING:
    from mixedkv.llama import Llama

logger = logging.getLogger(__name__)


@dataclass
class _Shifted:
    """Sequence 0 holds its first `kept` tokens and then those from `kept + dropped` on."""

    kept: int
    dropped: int


# By `Llama`, not by window: whoever uses one next must know what its sequence is.
_shifted: WeakKeyDictionary[Llama, _Shifted] = WeakKeyDictionary()


class Window:
    """Sequence 0 of a `Llama` as a window on a longer sequence.

    Args:
        llm: whose sequence.
        sinks: first tokens that always stay; None never drops anything.
        before_first: called before the first tokens are dropped, while the sequence is still whole.
    """

    def __init__(
        self, llm: Llama, sinks: int | None, before_first: Callable[[], None] = lambda: None
    ) -> None:
        self._llm = llm
        self.sinks = sinks
        self._before_first = before_first
        self._claim: Claim | None = None
        self.size = min(llm.kv.stats().n_ctx, len(llm.input_ids))

    @property
    def budget(self) -> int:
        """Tokens of a prompt that is cut to fit: there is room to generate without dropping more at once."""
        return budget(self.size, self.sinks or 0)

    def to_drop(self, tokens: Sequence[int]) -> int:
        """Return how many tokens behind the sinks have to go from a sequence that does not fit: whole
        messages, where that is not too much.
        """
        sinks = self.sinks or 0
        starts = message_starts(_llama_cpp.vocab(self._llm), np.asarray(tokens, np.int32))
        return cut(len(tokens), sinks, self.size, starts) - sinks

    @property
    def dropped(self) -> int:
        """Tokens dropped behind the sinks, so far."""
        state = _shifted.get(self._llm)
        return state.dropped if state else 0

    @property
    def whole(self) -> int:
        """Tokens whose KV is that of a plain prompt: all in the sequence as long as none was dropped."""
        state = _shifted.get(self._llm)
        return min(state.kept, self._llm.n_tokens) if state else self._llm.n_tokens

    def claim(self, owner: bytes) -> None:
        """Go on from what was left for this owner; what anyone else has evaluated since is dropped."""
        self._claim = Claim(self._llm, owner, untouched=True)
        if not self._claim.goes_on:
            self.begin()

    @property
    def mine(self) -> bool:
        """Nobody has claimed the sequence after this window."""
        return self._claim is not None and self._claim.holds

    def leave(self) -> None:
        """Leave the sequence as it is to who claims it next as the same owner."""
        if self._claim is not None:
            self._claim.leave()

    def _held(self) -> np.ndarray:
        return self._llm.input_ids[: self._llm.n_tokens]

    def begin(self, dropped: int = 0) -> None:
        """Start a sequence anew: a plain one, or one without `dropped` tokens behind the sinks."""
        _shifted.pop(self._llm, None)
        if dropped:
            _shifted[self._llm] = _Shifted(self.sinks or 0, dropped)

    def aligned(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens, dropped ones included, the shifted sequence stands for; 0 for
        none.
        """
        state = _shifted.get(self._llm)
        if state is None or state.kept != self.sinks:
            return 0
        held, wanted = self._held(), np.asarray(tokens, np.intc)
        if not np.array_equal(held[: state.kept], wanted[: state.kept]):
            return 0
        n = common_prefix(held[state.kept :], wanted[state.kept + state.dropped :])
        return state.kept + state.dropped + n if n else 0

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens behind those that are there, dropping older ones as needed.

        Raises:
            RuntimeError: someone else has claimed the sequence.
        """
        if not self.mine:
            raise RuntimeError(
                "another answer was begun on this Llama: read a stream to its end or close it before the next"
            )
        done = 0
        while done < len(tokens):
            if self._llm.n_tokens == self.size:
                self._make_room()
            part = tokens[done : done + self.size - self._llm.n_tokens]
            self._llm.eval(part)
            done += len(part)

    def _make_room(self) -> None:
        if self.sinks is None:
            raise ValueError(
                f"the context of {self.size} tokens is full: raise n_ctx, shorten the conversation, or set "
                f"attention_sink_tokens to drop the middle of it"
            )
        if not self.dropped:
            self._before_first()
        n = self.to_drop(self._held().tolist())
        close_gap(self._llm.kv, 0, self.sinks, self.sinks + n)
        first = self.sinks + self.dropped
        _shifted[self._llm] = _Shifted(self.sinks, self.dropped + n)
        logger.warning(
            "the context of %d tokens is full: tokens %d to %d of the conversation are dropped",
            self.size,
            first,
            first + n - 1,
        )
