"""Steps an engine on the threads that wait for its answers, in sequence 0 of a `Llama` that others may use
between two steps.
"""

from __future__ import annotations

import signal
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mixedkv.engine.jobs.job import Failed, Job
from mixedkv.engine.schedule.contract import StepPlan
from mixedkv.engine.stepping import Stepper
from mixedkv.errors import ContextBusyError, StoppedError, UnsupportedModelError
from mixedkv.llama import Llama
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.prefix.sequences import NO_MATCH, SequencePool
from mixedkv.tokens import common_prefix

_T = TypeVar("_T")
_ABORTED = 2  # llama_decode's code: the evaluation was ended from outside


def sequence_size(llm: Llama) -> int:
    """Return how many tokens sequence 0 can have."""
    n_ctx = llm.kv.stats().n_ctx
    return min(n_ctx, llm.n_ctx_requested or n_ctx)


class CallersTurn:
    """The right to use sequence 0 of a `Llama`, for one step at a time.

    After each turn `n_tokens` and `input_ids` of the `Llama` are what the sequence holds, so that
    `llm.sample` and `KVStore.save` go on from there. At the next one its rows count if nothing was evaluated
    or removed in between; otherwise they are dropped, and answers that have not ended fail with a
    ContextBusyError. Ctrl-C ends a native evaluation, and is handled when the step has ended: a step is done
    or undone.

    Args:
        pool: has one sequence.
        fail: ends all jobs with an error.

    Attributes:
        goes_on: what others evaluate behind the sequence's tokens belongs to it, see `hand_over`.
        stepping: a step is under way, which nothing may be called in.
        signal_came: a signal waits for the end of this turn.
    """

    def __init__(self, llm: Llama, pool: SequencePool, fail: Callable[[Exception], None]) -> None:
        self._llm, self._pool, self._fail = llm, pool, fail
        seq = pool.acquire("", NO_MATCH)
        assert seq is not None
        pool.release(seq)
        self._seq = seq
        self._lock, self._inside = threading.RLock(), False
        self._left = -1  # number of evaluations at the end of the latest turn
        self.goes_on = self.stepping = self.signal_came = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Use the sequence while inside.

        Raises:
            ContextBusyError: an engine with a thread uses the `Llama`.
            ClosedError, StoppedError: as `Llama.eval`.
        """
        with self._lock:
            if self._inside:
                yield
                return
            with self._signals_wait(), self._llm.turn("PromptCache") as before:
                self._inside = True
                try:
                    self._take(before)
                    yield
                except BaseException as error:  # nothing is known of the rows
                    self._fail(error if isinstance(error, Exception) else StoppedError("a step was ended"))
                    self._pool.drop(self._seq)
                    raise
                finally:
                    self._leave()
                    self._inside = False

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Run a function in a turn."""
        future: Future[_T] = Future()
        try:
            with self():
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)
        except Exception as error:
            if not future.done():
                future.set_exception(error)
        return future

    def hand_over(self, n_exact: int | None) -> None:
        """Let the caller go on by himself from what the sequence holds.

        Args:
            n_exact: its first tokens whose rows are exact; None for all.
        """
        self.goes_on = True
        if n_exact is not None:
            self._llm.kv.limit_exact(n_exact)
        _llama_cpp.has_logits(self._llm)

    def take_back(self) -> None:
        """Remove the rows of a step that did not end."""
        n = len(self._seq.tokens)
        if self._llm.kv.positions(0)[1] < n:
            return
        try:
            self._llm.kv.remove(0, n)
        except UnsupportedModelError:  # a state of the whole sequence cannot be cut
            self._pool.clear(self._seq)

    def _take(self, before: int) -> None:
        seq, llm = self._seq, self._llm
        goes_on, self.goes_on = self.goes_on, False
        if not seq.running:  # the window may have been changed
            self._pool.rule = replace(llm.kv.cut_rule, window=llm.kv.config.window)
        left, live = np.array(seq.tokens, np.int32), self._live()
        n = common_prefix(left, live)
        if n == len(left) == len(live) and before == self._left:
            return
        if goes_on and not seq.running and n == len(left) and n:
            seq.tokens = array("i", live.tobytes())
            seq.version += 1
            return
        if seq.running:
            self._fail(
                ContextBusyError(
                    "another answer was begun on this Llama, or its tokens were removed: read a stream to "
                    "its end or close it before that"
                )
            )
        self._pool.drop(seq)

    def _leave(self) -> None:
        tokens, llm = self._seq.tokens, self._llm
        n = min(len(tokens), len(llm.input_ids))
        llm.input_ids[:n] = tokens[:n]
        llm.n_tokens, self._left = n, llm.n_turns

    def _live(self) -> npt.NDArray[np.int32]:
        return np.asarray(self._llm.input_ids[: self._llm.n_tokens], np.int32)

    @contextmanager
    def _signals_wait(self) -> Iterator[None]:
        """While inside, let Ctrl-C end what llama.cpp evaluates; its handler runs afterwards."""
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(handler):
            yield
            return
        came: list[tuple[int, FrameType | None]] = []

        def note(number: int, frame: FrameType | None) -> None:
            came.append((number, frame))
            self.signal_came = True
            self._llm.interrupt()

        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)
            if came:
                self.signal_came = False
                self._llm.interrupt(False)
                handler(*came[0])


class CallersStepper(Stepper):
    """Steps on a caller's thread: one that was stopped is undone, and leaves the rows before it."""

    turn: CallersTurn

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._stopped: StoppedError | None = None

    def _decode(self, step: StepPlan[Job], drafts: bool = True) -> tuple[StepPlan[Job], int]:
        try:
            self._llm.watch(len(step))
        except StoppedError as error:
            self._stopped = error
            return step, _ABORTED
        return super()._decode(step, drafts)

    def _undo(self, code: int) -> None:
        self.turn.take_back()
        error, self._stopped = self._stopped or self._llm.decode_error(code), None
        if not isinstance(error, StoppedError):
            self._abandon(self._scheduler.running, error)
        elif not self.turn.signal_came:  # if a signal's handler raises nothing, the answer goes on
            for job in list(self._scheduler.running):
                self._scheduler.leave(job)
                self._outbox.put((job, Failed(error)))
                self._observer.cancelled(job)
