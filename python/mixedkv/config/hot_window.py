"""The hot-set rule: which positions of a sequence attention reads in F16, as cpp/hot_set/hot_window.h has it.

A rule on positions alone: tokens are hot until `threshold` of them are, then the oldest `group_size` leave
together; the first `sink_tokens` never leave. A sequence holds the F16 rows `n_draft` tokens longer than it
reads them.

The rule says what a cache promises. Which rows it has is another matter: F16 rows can make room for those of
other sequences, and a block that was loaded has those of its own window only. `KVCache.holds` looks
at the rows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HotWindow:
    """The rule with its numbers; those of an F16 or uniform cache are 0, 1, 0 and 0."""

    threshold: int = 0
    group_size: int = 1
    sink_tokens: int = 0
    n_draft: int = 0

    def begin(self, q: int) -> int:
        """Return the first position of the recent window of a query at position `q`; q + 1 where there is no
        window.
        """
        if self.threshold == 0:
            return q + 1
        return max(0, -(-(q + 1 - self.threshold) // self.group_size)) * self.group_size

    def contains(self, p: int, q: int) -> bool:
        """Return whether the query at position `q` reads the key at position `p` in F16."""
        return p >= self.begin(q) or p < self.sink_tokens

    def held_begin(self, q: int) -> int:
        """Return the first position of the recent rows that a sequence holds whose last token is at position
        `q`.
        """
        return self.begin(max(q - self.n_draft, -1)) if self.threshold else self.begin(q)

    def cut_is_exact(self, n: int, at: int) -> bool:
        """Return whether a sequence evaluated to `n` tokens, then cut or copied at `at`, can go on as if it
        had never been longer: every F16 row that the query at position `at` reads is one that the sequence
        holds.

        So it is if no row has made room for another sequence's, and all of them were evaluated here.
        """
        first = max(self.begin(at), self.sink_tokens)
        return n == at or first >= at or self.held_begin(n - 1) <= first
