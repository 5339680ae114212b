"""Shortens a sequence that is longer than its context. Its first tokens stay, on which attention rests, and
the newest ones (StreamingLLM, arXiv:2309.17453). The middle is dropped, up to a message boundary if there is
one. No model and no rows here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv.tokens import Tokens

Overflow = Literal["refuse", "slide"]
Places = npt.NDArray[np.int64]  # positions of tokens, ascending

SINKS = 4  # tokens, as in the paper
NOWHERE: Places = np.empty(0, np.int64)

_SHARE = 4  # a quarter of what may go goes at once: moving rows costs about one pass over K


def budget(size: int, head: int) -> int:
    """Return the number of tokens that are left of a sequence when it has been cut to fit `size`, of which
    `head` always stay.
    """
    return size - max(1, (size - head) // _SHARE)


def head_of(starts: Places, size: int) -> int:
    """Return how many first tokens stay: the first message, if that is no more than a quarter of the context.

    Args:
        starts: where messages begin.
        size: tokens of the context.
    """
    first = next((int(start) for start in starts if start > 0), 0)
    return first if SINKS <= first <= size // _SHARE else SINKS


def cut(n: int, head: int, size: int, starts: Places = NOWHERE) -> int:
    """Return the end of the part to drop from n tokens, which begins at `head`: at the next message, unless
    that would drop more than half of the tokens that could stay.
    """
    end = head + n - budget(size, head)
    near = starts[(starts >= end) & (starts <= end + (n - end) // 2)]
    return int(near[0]) if len(near) else end


@dataclass(frozen=True, slots=True)
class DroppedTokens:
    """Tokens that have been left out of a longer sequence: `n` of them, from `begin` on.

    Args:
        hash: hash of them, to tell apart sequences that have lost different tokens.
    """

    begin: int
    n: int = 0
    hash: Any = field(default_factory=sha256)

    def wider(self, tokens: Tokens) -> DroppedTokens:
        """Return the range widened by the tokens after it."""
        grown = self.hash.copy()
        grown.update(np.ascontiguousarray(tokens, np.int32).tobytes())
        return DroppedTokens(self.begin, self.n + len(tokens), grown)

    def is_of(self, whole: Tokens) -> bool:
        """Return whether `whole` has the same tokens in this range."""
        missing = np.ascontiguousarray(whole[self.begin : self.begin + self.n], np.int32)
        return bool(sha256(missing.tobytes()).digest() == self.hash.digest())


def without(tokens: Tokens, begin: int, n: int) -> Tokens:
    """Return the tokens without the `n` from `begin` on."""
    return np.concatenate([tokens[:begin], tokens[begin + n :]])


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """Holds a prompt that is longer than the context.

    Args:
        tokens: all of it.
        head: first tokens that stay.
        size: of the context.
        starts: where its messages begin, as far as they can stay.
        boundaries: where they begin and end.
    """

    tokens: Tokens
    head: int
    size: int
    starts: Places = field(default_factory=lambda: NOWHERE)
    boundaries: tuple[int, ...] = ()

    def to_drop(self, dropped: int = 0) -> int:
        """Return how many tokens behind the head have to go, if so many have gone already."""
        if dropped and len(self.tokens) - dropped < self.size:
            return dropped
        return cut(len(self.tokens), self.head, self.size, self.starts) - self.head

    def without(self, n: int) -> Tokens:
        return without(self.tokens, self.head, n)

    def beginning(self, size: int, n: int) -> Tokens:
        """Return at least the first `size` tokens of what is left without `n`, or all of it."""
        return without(self.tokens[: size + n], self.head, n)

    def dropped_tokens(self, n: int) -> DroppedTokens:
        return DroppedTokens(self.head).wider(self.tokens[self.head : self.head + n])

    def boundaries_without(self, n: int) -> list[int]:
        """Return where messages begin and end in what is left."""
        end = self.head + n
        return [at if at < end else at - n for at in self.boundaries if not self.head <= at < end]


def message_starts(vocab: Any, tokens: Tokens) -> Places:
    """Return the positions of the first control token behind each one that ends a message; none in plain
    text.

    Args:
        vocab: llama.cpp's.
        tokens: int32 [n]; those below zero are of images.
    """
    kinds = np.unique(tokens).tolist()
    control = [t for t in kinds if t >= 0 and _attributes(vocab, t) & llama_cpp.LLAMA_TOKEN_ATTR_CONTROL]
    ends = [token for token in control if llama_cpp.llama_vocab_is_eog(vocab, token)]
    at = np.flatnonzero(np.isin(tokens, control))
    starts: Places = at[1:][np.isin(tokens[at[:-1]], ends)]
    return starts


def _attributes(vocab: Any, token: int) -> int:
    return int(llama_cpp.llama_vocab_get_attr(vocab, token))
