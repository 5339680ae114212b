"""Rules for where a sequence can be cut, and go on as if it had never been longer; no model and no rows here.

Rows of a token range can be cut anywhere. What a cache keeps besides belongs to the moment: F16 copies of the
recent rows, rows of sliding windows, the state of recurrent layers.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from mixedkv._core import HotWindow


@dataclass(frozen=True, slots=True)
class CutRule:
    """Says what a cache keeps besides rows of all tokens, and so where it can be cut.

    Args:
        window: which rows have F16 copies.
        sliding: tokens that layers with a sliding window see; 0 where all layers keep all rows.
        recurrent: some layers keep a state of all tokens.
        slides: some layers have a sliding window, however many rows they have room for: which rows are there
            is asked of the cache, see `KVCache.longest_cut`.
    """

    window: HotWindow = field(default_factory=HotWindow)
    sliding: int = 0
    recurrent: bool = False
    slides: bool = False

    @property
    def anywhere(self) -> bool:
        """Every cut is exact: there is nothing but rows of all tokens."""
        return not (self.recurrent or self.sliding or self.window.threshold)

    @property
    def only_approximate(self) -> bool:
        """A cut that is not exact can go on all the same, with some rows in the cold type instead of F16."""
        return not (self.recurrent or self.sliding)

    def cut_is_exact(self, n: int, at: int) -> bool:
        """Return whether a sequence of `n` tokens, as it stands, can be cut at `at`."""
        if n == at:
            return True
        return not self.recurrent and n <= (self.sliding or n) and self.window.cut_is_exact(n, at)

    def saved_from(self, n: int) -> int:
        """Return the first cut that a state saved at `n` tokens serves; it serves every cut from there to
        `n`.
        """
        if self.recurrent:
            return n
        first = n - 1 if n > (self.sliding or n) else 0  # the token at n - 1 has seen the same rows
        # monotone: the window of a later cut begins later
        return bisect_left(range(n), True, first, n, key=lambda at: self.window.cut_is_exact(n, at))

    def save_at(self, cut: int, end: int) -> int:
        """Return where to save on the way to `end` tokens, so that it serves a cut at `cut` and as many as
        possible behind it.
        """
        if self.recurrent:
            return cut
        if self.sliding:
            return min(cut + 1, end)
        at = cut
        while at < end and self.window.cut_is_exact(at + 1, cut):
            at += 1
        return at
