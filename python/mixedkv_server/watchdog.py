"""Notices an engine that makes no step although work is waiting, and logs where it is."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

from mixedkv.engine import Engine
from mixedkv.errors import ModelChangedError

log = logging.getLogger("mixedkv.server")

TICK_SECONDS = 1.0
EXIT_CODE = 75  # EX_TEMPFAIL: a supervisor starts the server again


class Watchdog:
    """Looks at all engines once a second while it is entered.

    Args:
        engines: returns the engines of models that are in memory.
        restart: end the process when an engine is stuck, or its model's file has changed, for a supervisor to
            start it again.
    """

    def __init__(self, engines: Callable[[], Iterable[Engine]], *, restart: bool = False) -> None:
        self._engines, self._restart = engines, restart
        self._watches: WeakKeyDictionary[Engine, StepWatch] = WeakKeyDictionary()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mixedkv-watchdog", daemon=True)

    @property
    def stuck_seconds(self) -> float:
        """Seconds that an engine has been without a step while it is stuck; 0 if none is."""
        return max((watch.seconds for watch in list(self._watches.values()) if watch.is_stuck), default=0.0)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            for engine in self._engines():
                self._look(engine)
                if self._restart and isinstance(engine.closing_error, ModelChangedError):
                    os.kill(os.getpid(), signal.SIGTERM)  # the file is read when the server is started again
                    return

    def _look(self, engine: Engine) -> None:
        watch = self._watches.get(engine)
        if watch is None:
            watch = self._watches[engine] = StepWatch(engine)
        before = watch.is_stuck
        watch.tick(TICK_SECONDS)
        if watch.is_stuck == before:
            return
        if before:
            log.warning("the engine makes steps again")
            return
        log.error(
            "the engine is stuck: no step has ended for %.0f seconds, and work is waiting. This is a bug, "
            "please report it. Its thread is here:\n%s",
            watch.seconds,
            stack_of(engine.thread_id),
        )
        if self._restart:
            log.error("the server ends, to be started again")
            logging.shutdown()
            os._exit(EXIT_CODE)


LEAST_SECONDS = 60.0
FIRST_SECONDS = 600.0  # for the first step, as nobody knows yet how long one takes
_TIMES = 2  # the slowest step, measured


class StepWatch:
    """Watches one engine. Time counts in ticks, so that a process that was stopped for a while is not stuck
    when it goes on.

    Attributes:
        seconds: since work has been waiting without a step that ended.
    """

    def __init__(self, engine: Engine) -> None:
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
