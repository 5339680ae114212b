"""Up to where the rows of a sequence are those that an evaluation from its first token would have made."""

from __future__ import annotations

from collections.abc import Callable

from mixedkv.limits import INT32_MAX


class ExactRows:
    """Follows what is done to sequence 0 of a `Llama`.

    A token's rows depend on what its layers could read when it was evaluated. They stop being exact where
    tokens are evaluated behind a window whose F16 rows have aged out (after a rollback or a cut block) or
    made room for those of other sequences, or behind rows that were moved, converted or computed under
    another window.
    """

    def __init__(self) -> None:
        self._limit = INT32_MAX
        self._end = 0  # where the last evaluation stopped
        self._looked = True  # nobody but the evaluation has touched the window since

    def count(self, n_tokens: int) -> int:
        """How many of the sequence's tokens have exact rows."""
        return min(self._limit, n_tokens)

    def limit(self, n: int) -> None:
        """Rows from position `n` on are not exact."""
        self._limit = min(self._limit, n)

    def loaded(self, begin: int, end: int) -> None:
        """Rows of [begin, end) came from a block, with the F16 rows it had."""
        if begin == 0:
            self._limit = INT32_MAX
        self._end, self._looked = end, False

    def before_eval(self, n: int, window_is_whole: Callable[[int], bool]) -> None:
        """Evaluation goes on at position `n`; what was behind is gone."""
        if n == 0:
            self._limit = INT32_MAX
        elif n <= self._limit and not (n == self._end and self._looked):
            self._limit = INT32_MAX if window_is_whole(n) else n
        self._looked = True

    def after_eval(self, end: int, short_from: int) -> None:
        """It stopped at `end`; what is at `short_from` and after, if that is 0 or more, found rows gone."""
        self._end = end
        if short_from >= 0:
            self.limit(short_from)
