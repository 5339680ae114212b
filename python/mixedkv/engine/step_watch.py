"""Tells whether an engine is stuck: work is waiting, and no step ends."""

from __future__ import annotations

import sys
import traceback
from typing import Protocol

LEAST_SECONDS = 60.0
FIRST_SECONDS = 600.0  # for the first step, as nobody knows yet how long one takes
_TIMES = 2  # the slowest step, measured


class Steps(Protocol):
    """The part of an engine that is watched."""

    @property
    def n_steps(self) -> int: ...

    @property
    def slowest_step_seconds(self) -> float: ...

    @property
    def has_work(self) -> bool: ...


class StepWatch:
    """Watches one engine. Time counts in ticks, so that a process that was stopped for a while is not stuck
    when it goes on.

    Attributes:
        seconds: since work has been waiting without a step that ended.
    """

    def __init__(self, engine: Steps) -> None:
        self._engine, self._n_steps = engine, engine.n_steps
        self.seconds = 0.0

    @property
    def patience(self) -> float:
        """Seconds without a step after which the engine counts as stuck."""
        if not self._n_steps:
            return max(LEAST_SECONDS, FIRST_SECONDS)
        return max(LEAST_SECONDS, _TIMES * self._engine.slowest_step_seconds)

    @property
    def is_stuck(self) -> bool:
        return self.seconds >= self.patience

    def tick(self, seconds: float) -> None:
        """Look at the engine, `seconds` after the last look."""
        if self._engine.n_steps != self._n_steps or not self._engine.has_work:
            self._n_steps, self.seconds = self._engine.n_steps, 0.0
        else:
            self.seconds += seconds


def stack_of(thread: int | None) -> str:
    """Return where a thread is now, given its `ident`."""
    frame = sys._current_frames().get(thread or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "the thread has ended"
