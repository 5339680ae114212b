"""Chooses the places of a text that are remembered, by their content.

So a passage has the same places wherever it stands and whatever is before it: winnowing (Schleimer,
Wilkerson, Aiken, SIGMOD 2003).
"""

from __future__ import annotations

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv.llama import Llama
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.tokens import Tokens

WIDTH = 16  # tokens of a fingerprint
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SENTENCE, _LINE, _MESSAGE = 1, 2, 3
_SENTENCE_ENDS = tuple(text.encode() for text in (".", "!", "?", "。", "！", "？"))  # noqa: RUF001


class TextEnds:
    """Tells by token id what ends with a token: 0 nothing, 1 a sentence, 2 a line, 3 a message."""

    def __init__(self, llm: Llama) -> None:
        self._vocab = _llama_cpp.vocab(llm)
        self._kinds = np.full(llm.n_vocab(), -1, np.int8)
        self._llm = llm

    def of(self, tokens: Tokens) -> npt.NDArray[np.int8]:
        """Return the kind of end for each token, int8 [n]."""
        unknown = np.unique(tokens[self._kinds[tokens] < 0])
        for token in unknown.tolist():
            self._kinds[token] = self._look(token)
        kinds: npt.NDArray[np.int8] = self._kinds[tokens]
        return kinds

    def _look(self, token: int) -> int:
        if llama_cpp.llama_vocab_is_control(self._vocab, token):
            return _MESSAGE if llama_cpp.llama_vocab_is_eog(self._vocab, token) else 0
        piece = self._llm.detokenize([token])
        if b"\n" in piece:
            return _LINE
        return _SENTENCE if piece.rstrip(b" \"')").endswith(_SENTENCE_ENDS) else 0


def slide(ends: npt.NDArray[np.int8], begin: int, end: int, window: int) -> tuple[int, int]:
    """Return the part of [begin, end) that begins and ends at the edge of a message, a line or a sentence, in
    this order of preference, dropping at most `window` tokens on either side.
    """
    after = ends[max(0, begin - 1) : min(end, begin + window)]  # what ends before each place
    before = ends[max(begin, end - 1 - window) : end][::-1]
    if len(after) and begin > 0 and after.max() > 0:
        begin += int(np.argmax(after == after.max()))
    if len(before) and before.max() > 0:
        end -= int(np.argmax(before == before.max()))
    return begin, max(begin, end)


def find_fingerprints(tokens: Tokens, chunk_size: int) -> npt.NDArray[np.int64]:
    """Return the places by whose next `WIDTH` tokens a passage is found, ascending.

    Winnowing: of the hashes of each `WIDTH` consecutive tokens, the least in each window of chunk_size -
    WIDTH + 1 hashes. So two texts that share chunk_size tokens have a place in common there.
    """
    if len(tokens) < WIDTH:
        return np.empty(0, np.int64)
    hashes = _hashes(tokens)
    window = min(len(hashes), chunk_size - WIDTH + 1)
    views = np.lib.stride_tricks.sliding_window_view(hashes, window)
    least = views.argmin(axis=1) + np.arange(len(views))
    places: npt.NDArray[np.int64] = np.unique(least)
    return places


def _hashes(tokens: Tokens) -> npt.NDArray[np.uint64]:
    """Return the hash of each `WIDTH` consecutive tokens."""
    n = len(tokens) - WIDTH + 1
    ids = tokens.astype(np.uint64) + np.uint64(1)
    hashes = np.zeros(n, np.uint64)
    with np.errstate(over="ignore"):
        for i in range(WIDTH):
            hashes = (hashes ^ ids[i : i + n]) * _MULTIPLIER
            hashes ^= hashes >> np.uint64(29)
    return hashes
