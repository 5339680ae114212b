"""Tracks how many rows of a sequence equal an evaluation from its first token."""

from __future__ import annotations

from collections.abc import Callable

from mixedkv.limits import INT32_MAX


class ExactRows:
    """Tracks the exact rows of sequence 0 of a `Llama`.

    A token's rows depend on what its layers could read when it was evaluated. They stop being exact where
    tokens are evaluated behind a window whose F16 rows have aged out (after a rollback or a cut block) or
    made room for those of other sequences, or behind rows that were moved, converted or computed under
    another window. Rows of a step count when it has ended well, never before: whatever ends it early, at
    whatever moment, leaves them without a word for them.
    """

    def __init__(self) -> None:
        self._limit = INT32_MAX
        self._promised = INT32_MAX  # the limit, once the step at hand has ended well
        self._end = 0  # where the last step stopped
        self._looked = True  # nobody but that step has touched the window since

    def count(self, n_tokens: int) -> int:
        """Return how many of the sequence's tokens have exact rows."""
        return min(self._limit, n_tokens)

    def limit(self, n: int) -> None:
        """Mark rows from position `n` on as not exact."""
        self._limit = min(self._limit, n)

    def loaded(self, begin: int, end: int) -> None:
        """Note that rows of [begin, end) came from a block, with the F16 rows it had."""
        if begin == 0:
            self._limit = INT32_MAX
        self._end, self._looked = end, False

    def touched(self) -> None:
        """Note that the window was changed by something else than an evaluation at the end."""
        self._looked = False

    def goes_on(self, n: int) -> bool:
        """Return whether an evaluation at `n` follows the last one, and nothing has come between."""
        return n == 0 or (n == self._end and self._looked)

    def begin_step(self, n: int, window_is_whole: Callable[[int], bool]) -> None:
        """Begin an evaluation at position `n`; rows from there on are gone. Until the step is known to have
        ended well no row from `n` on is exact.
        """
        if n == 0:
            self._limit = INT32_MAX
        elif n <= self._limit and not self.goes_on(n):
            self._limit = INT32_MAX if window_is_whole(n) else n
        self._promised, self._limit, self._looked = self._limit, min(self._limit, n), False

    def end_step(self, end: int, short_from: int) -> None:
        """End a step that went well, at `end`. Rows from `short_from` on, if it is 0 or more, lacked F16
        rows.
        """
        self._limit = self._promised if short_from < 0 else min(self._promised, short_from)
        self._end, self._looked = end, True
