"""The numbers of a request: what was evaluated, what was cached, and when."""

from __future__ import annotations

import time


class WorkCounts:
    """Counts what a request took so far.

    Attributes:
        evaluated: the whole prompt was evaluated once.
        n_cached: tokens of the prompt that were not evaluated; None before it has a sequence.
        n_approximate: how many of these have rows that differ from those of an evaluation.
        cached_tier: where the rows of these were: "context", "ram", "disk" or "remote".
        exact: every row equals that of an evaluation from the first token; asked of the cache when the
            request leaves its rows. False, too, once tokens of its text were dropped.
        method: how rows that were computed elsewhere are repaired; "" where none are used.
        n_chosen: number of tokens that were chosen, including one that ends the answer.
        t_submit, t_start, t_first, t_last, t_end: when it was submitted, got a sequence, had its first and
            its latest token chosen, and ended; by `time.perf_counter`.
    """

    def __init__(self) -> None:
        self.evaluated = False
        self.n_cached: int | None = None
        self.n_approximate = 0
        self.cached_tier = ""
        self.exact = True
        self.method = ""
        self.n_chosen = 0
        self.t_submit = time.perf_counter()
        self.t_start: float | None = None
        self.t_first: float | None = None
        self.t_last: float | None = None
        self.t_end: float | None = None

    @property
    def n_cached_exact(self) -> int:
        return (self.n_cached or 0) - self.n_approximate

    def set_cached(self, n: int, exact: bool) -> None:
        """Note that the first `n` tokens of the prompt had rows already, which can be gone on from exactly or
        not.
        """
        self.n_cached, self.n_approximate = n, 0 if exact else n

    def add_reused(self, n: int) -> None:
        """Note that further `n` tokens have rows which were computed elsewhere."""
        self.n_cached, self.n_approximate = (self.n_cached or 0) + n, self.n_approximate + n

    def chose(self, token_time: float) -> None:
        """Add a token that was chosen to the answer."""
        self.n_chosen += 1
        self.t_first, self.t_last = self.t_first or token_time, token_time
