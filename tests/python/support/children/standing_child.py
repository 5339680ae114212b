"""`mixedkv serve` that notes when its event loop or its engine's thread stands, as work is done there.

python standing_child.py FILE [options of serve]

FILE gets a line of JSON for each time that one of these took longer than `MOST_SECONDS` of a processor:

- a turn of the event loop;
- a round of the engine's thread, without the model's own evaluation;
- a thread that held Python's lock meanwhile, with which all others stand.

Time of a processor is counted, not time on the clock, so that a busy machine changes nothing; a slow one gets
more of it, by what a piece of Python takes there.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from mixedkv.cli.main import main
from mixedkv.engine.batch.batch import Batch
from mixedkv.engine.engine import Engine
from mixedkv_server.pending import Delivery

MOST_SECONDS = 0.1
_USUAL = 0.025  # what `_piece_of_python` takes on the machine on which attacks were measured
_PAUSE = 0.005


def _piece_of_python() -> float:
    began = time.thread_time()
    sum(i * i % 7 for i in range(300_000))
    return time.thread_time() - began


def most_seconds() -> float:
    """What may be taken on this machine."""
    return MOST_SECONDS * max(1.0, min(_piece_of_python() for _ in range(3)) / _USUAL)


def _stack(ident: int | None) -> list[str]:
    frame = sys._current_frames().get(ident or 0)
    return [line.strip() for line in traceback.format_stack(frame)[-6:]] if frame is not None else []


def _delay() -> float:
    """Seconds for which this thread was ready, and no processor was free for it."""
    with suppress(OSError, IndexError, ValueError):
        text = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text()
        return int(text.split()[1]) / 1e9
    return 0.0


class Standing:
    """Watches the threads of a server and writes down who stood, for how long, and where."""

    def __init__(self, file: Path, most: float) -> None:
        self._file, self._most = file, most
        self._loop_thread, self._beat, self._used = 0, 0.0, 0.0
        self._where: list[str] = []  # the loop was when it last stood

    def note(self, who: str, seconds: float, stack: list[str]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"who": who, "seconds": round(seconds, 3), "stack": stack}) + "\n")

    # --- the event loop ---

    def begin(self) -> None:
        """Watch the running loop, and all threads."""
        self._loop_thread = threading.get_ident()
        self._beat, self._used = time.monotonic(), time.thread_time()
        asyncio.get_running_loop().call_later(_PAUSE, self._turn)
        threading.Thread(target=self._watch, daemon=True, name="standing").start()

    def _turn(self) -> None:
        used = time.thread_time()
        if used - self._used > self._most:
            self.note("event loop", used - self._used, self._where)
        self._beat, self._used = time.monotonic(), used
        asyncio.get_running_loop().call_later(_PAUSE, self._turn)

    # --- the engine's thread ---

    def watch_engine(self) -> None:
        """Count what rounds take without the evaluation of the model."""
        evaluating = threading.local()
        decode, one_round = Batch.decode, Engine._one_round

        def timed_decode(batch: Batch, *args: Any) -> Any:
            began = time.thread_time()
            try:
                return decode(batch, *args)
            finally:
                evaluating.seconds = getattr(evaluating, "seconds", 0.0) + time.thread_time() - began

        def timed_round(engine: Engine) -> None:
            evaluating.seconds, began = 0.0, time.thread_time()
            one_round(engine)
            seconds = time.thread_time() - began - evaluating.seconds
            if seconds > self._most:
                self.note("engine", seconds, [])

        Batch.decode, Engine._one_round = timed_decode, timed_round  # type: ignore[method-assign, assignment]

    # --- Python's lock ---

    def _watch(self) -> None:
        times, delay, at = self._times(), _delay(), time.monotonic()
        while True:
            time.sleep(_PAUSE)
            now, new_delay, new = time.monotonic(), _delay(), self._times()
            waited = now - at - _PAUSE - (new_delay - delay)
            if waited > self._most:
                used, ident = max((new[ident] - times.get(ident, 0.0), ident) for ident in new)
                if used > self._most:
                    names = {thread.ident: thread.name for thread in threading.enumerate()}
                    self.note(f"Python's lock, by {names.get(ident)}", used, _stack(ident))
            if now - self._beat > self._most / 3:
                self._where = _stack(self._loop_thread)
            times, delay, at = new, new_delay, now

    def _times(self) -> dict[int, float]:
        """Seconds of a processor that each thread has used."""
        found = {}
        for thread in threading.enumerate():
            with suppress(OSError, ValueError):  # it has just ended
                ident = thread.ident or 0
                found[ident] = time.clock_gettime(time.pthread_getcpuclockid(ident))
        found.pop(threading.get_ident(), None)
        return found


if __name__ == "__main__":
    standing = Standing(Path(sys.argv[1]), most_seconds())
    begin = Delivery.begin

    def begin_watched(delivery: Delivery) -> None:
        standing.begin()
        begin(delivery)

    Delivery.begin = begin_watched  # type: ignore[method-assign, assignment]
    standing.watch_engine()
    sys.exit(main(["serve", *sys.argv[2:]]))
