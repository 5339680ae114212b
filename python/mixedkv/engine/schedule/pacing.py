"""Decides how many prompt tokens go into a step, so that running answers are not held up."""

from __future__ import annotations

from collections.abc import Sequence

from mixedkv.limits import real

_SMOOTHING = 0.1
_LEAST = 0.25  # at least one prompt token in every fourth step
_FIRST = 16.0  # prompt tokens of the first step beside running answers
_DOWN, _UP = 0.9, 1.05  # at rest one step in three is over the limit
_FAST_UP = 1.4  # while steps take less than half of what they may
_PROBE = 32  # after so many steps one without prompts, to measure how long that takes now

SLOWDOWN = 2.0  # of a step, at most, as prompts are evaluated in it


class Pace:
    """Says how many prompt tokens the next step can take.

    A step with running answers (streams) may take at most `slowdown` times as long as without prompts. If
    more prompts wait than streams run, the time for prompts grows by their ratio. A step without streams
    takes a whole batch. The cost of a token depends on the model, its depth and the load of the machine, so
    the slice is controlled by measuring: it shrinks after a step that took too long and grows after others.
    The time of a step without prompts is measured for each number of streams.
    """

    def __init__(self, n_batch: int, slowdown: float) -> None:
        self._n_batch, self._slowdown = n_batch, real("slowdown", slowdown, 1)
        self._slice = _FIRST  # prompt tokens, at as many streams as prompts
        self._extra = 1.0  # of the last budget
        self._credit = 0.0  # half a token means one token every second step
        self._n_mixed = 0
        self._alone: dict[int, float] = {}  # average seconds of a step without prompts, by number of streams

    def budget(self, n_streams: int, n_prompts: int = 1) -> int:
        if n_streams == 0:
            return self._n_batch
        if self._n_mixed >= _PROBE or n_streams not in self._alone:
            return 0
        self._extra = max(1.0, n_prompts / n_streams)
        self._credit = self._credit % 1 + self._slice * self._extra
        return min(self._n_batch - n_streams, int(self._credit))

    def observe(self, n_streams: int, n_prompt: int, seconds: float) -> None:
        """Adapt to the time that a step took."""
        alone = self._alone.get(n_streams)
        if n_prompt == 0:
            before = seconds if alone is None else alone
            self._alone[n_streams] = before + _SMOOTHING * (seconds - before)
            self._n_mixed = 0
        elif n_streams and alone is not None:
            self._n_mixed += 1
            limit = alone * (1 + (self._slowdown - 1) * self._extra)
            if seconds > limit:
                self._slice = max(_LEAST, self._slice * _DOWN)
            elif n_prompt >= int(self._slice * self._extra):
                up = _FAST_UP if seconds < limit / 2 else _UP
                self._slice = min(float(self._n_batch), self._slice * up)


def share(budget: int, remaining: Sequence[int]) -> list[int]:
    """Divide a step's prompt tokens among prompts, oldest first. The oldest gets all of them, or half if
    there are shorter prompts, so that these do not wait for a long one. Prompts of equal length are evaluated
    one after the other, since a batch of many sequences is slower than one of few.
    """
    given = [0] * len(remaining)
    if not remaining:
        return given

    def give(i: int, n: int) -> None:
        nonlocal budget
        n = min(n, budget, remaining[i] - given[i])
        given[i] += n
        budget -= n

    others = sorted(range(1, len(remaining)), key=lambda i: remaining[i])
    shorter = [i for i in others if remaining[i] < remaining[0]]
    give(0, -(-budget // 2) if shorter else budget)
    for i in [*shorter, 0, *others]:
        give(i, budget)
    return given
