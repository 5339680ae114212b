"""The hot-set rule: which positions of a sequence attention reads in F16, as cpp/hot_set/hot_window.h has it.

A rule on positions alone: tokens are hot until `threshold` of them are, then the oldest `group_size` leave
together; the first `sink_tokens` never leave.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HotWindow:
    """The rule with its three numbers; those of an F16 or uniform cache are all 0, 1 and 0."""

    threshold: int = 0
    group_size: int = 1
    sink_tokens: int = 0

    def begin(self, q: int) -> int:
        """First position of the recent window of a query at position `q`; q + 1 where there is no window."""
        if self.threshold == 0:
            return q + 1
        return max(0, -(-(q + 1 - self.threshold) // self.group_size)) * self.group_size

    def contains(self, p: int, q: int) -> bool:
        """Whether the query at position `q` reads the key at position `p` in F16."""
        return p >= self.begin(q) or p < self.sink_tokens

    def cut_is_exact(self, n: int, at: int) -> bool:
        """Whether a sequence evaluated to `n` tokens, then cut or copied at `at`, goes on as if it had never
        been longer: it still has every F16 row that the query at position `at` reads.

        The query at n - 1 was the last to let rows go; sinks never do.
        """
        first = max(self.begin(at), self.sink_tokens)
        return n == at or first >= at or self.begin(n - 1) <= first
