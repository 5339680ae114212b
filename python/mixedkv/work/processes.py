"""Processes for work that may take any time or memory: each has a clock and a limit, and is ended with the
work that nobody waits for. Threads cannot be stopped.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mixedkv.work.current import GivenUpError, Work, current
from mixedkv.work.fair_pool import FairPool
from mixedkv.work.turns import Limits, unlimited

CLOCK_SECONDS = 60.0  # on the clock, beside the seconds of a processor, where no processor is free
_PROGRAM = Path(__file__).with_name("program.py")
_KILL = 9  # by the clock, or by a system that runs out of memory


class Task(NamedTuple):
    """A function that a process runs.

    Args:
        file: it is in. A file that imports nothing of this package starts quickly.
        function: takes fields of JSON and bytes, and returns both.
        seconds: of a processor, that it may take.
        n_bytes: of address space, that it may take beside what is taken already.
    """

    file: str
    function: str
    seconds: float
    n_bytes: int


class EndedError(ValueError):
    """The task took more than it may, or crashed."""


class KilledError(ValueError):
    """A process was killed: no processor was free for long, or the system has no memory left."""


class TaskProcesses:
    """Runs tasks in a few processes, in turns of tenants. They start with the first task, and end when they
    had none for a while.

    Args:
        limits: returns the limits of a tenant, of which the weight counts.
    """

    def __init__(self, n: int, limits: Limits = unlimited) -> None:
        self._pool = FairPool(n, "mixedkv-process", limits)
        self._own = threading.local()  # the process of each thread
        self._all: list[_Process] = []

    def call(self, task: Task, fields: dict[str, Any], data: bytes = b"") -> tuple[dict[str, Any], bytes]:
        """Run a task for the current work, and return the fields and the bytes that it returned.

        Raises:
            ValueError: the task raised it.
            EndedError: it took too much time or memory.
            KilledError: it was killed, which need not be its doing.
            GivenUpError: nobody waits for the work.
            RuntimeError: the process does not start, or the task has a bug.
        """
        work = current()
        future = self._pool.submit(work.tenant, self._ask, work, task, fields, data, work=work)
        try:
            with work.ended_by(future.cancel):  # while it waits for its turn
                return future.result()
        except CancelledError:
            raise GivenUpError from None

    def end(self) -> None:
        """End all processes. They start again when they are needed."""
        for process in self._all:
            process.end()

    def _ask(
        self, work: Work, task: Task, fields: dict[str, Any], data: bytes
    ) -> tuple[dict[str, Any], bytes]:
        process = getattr(self._own, "process", None)
        if process is None:
            process = self._own.process = _Process()
            self._all.append(process)
        with work.ended_by(process.kill):
            try:
                return process.ask(task, fields, data)
            except (EndedError, KilledError):
                work.check()  # that was the reason
                raise


class _Process:
    """A process that runs one task at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, task: Task, fields: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        head = json.dumps({**task._asdict(), "fields": fields, "size": len(data)}).encode() + b"\n"
        answer, code = None, 0
        for _ in range(2):  # one that had nothing to do for long may end just now
            process = self._process
            if process is None or process.poll() is not None:
                self.end()
                process = self._process = start()
            try:
                answer, code = _exchange(process, head, data), process.returncode
            except KilledError:
                self.end()  # it may take a while to die, and the next task needs another one
                raise
            if answer is not None or code != 0:
                break
        if answer is None:
            self.end()
            if code == -_KILL:
                raise _late()
            raise EndedError(f"it takes more than {task.seconds:g} seconds or {_size(task.n_bytes)}")
        fields, data = answer
        if "error" in fields:
            raise ValueError(fields["error"])
        if "memory" in fields:
            raise EndedError(f"it takes more than {_size(task.n_bytes)}")
        if "bug" in fields:
            raise RuntimeError(f"{task.function} failed in its process: {fields['bug']}")
        return fields, data

    def kill(self) -> None:
        """End the process; what waits for it sees that."""
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _size(n_bytes: int) -> str:
    return f"{n_bytes >> 30} GiB" if n_bytes >= 1 << 30 else f"{n_bytes >> 20} MiB"


def _exchange(
    process: subprocess.Popen[bytes], head: bytes, data: bytes
) -> tuple[dict[str, Any], bytes] | None:
    """Return the answer to a request; None if the process ended over it.

    Raises:
        KilledError: it took longer than `CLOCK_SECONDS`.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    late = threading.Event()  # Windows does not tell how a process ended

    def kill() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(CLOCK_SECONDS, kill)
    timer.daemon = True
    timer.start()
    try:
        process.stdin.write(head)
        process.stdin.write(data)
        process.stdin.flush()
        line = process.stdout.readline()
        if line.endswith(b"\n"):
            fields: dict[str, Any] = json.loads(line)
            size = fields.pop("size")
            found = process.stdout.read(size)
            if len(found) == size:
                return fields, found
    except OSError:
        pass
    finally:
        timer.cancel()
    with suppress(subprocess.TimeoutExpired):
        process.wait(CLOCK_SECONDS)  # the end of its output is its own end
    if late.is_set():
        raise _late()
    return None


def _late() -> KilledError:
    return KilledError(f"it was not done within {CLOCK_SECONDS:g} seconds: try again later")


def start() -> subprocess.Popen[bytes]:
    """Start a process, and return when it is ready.

    Raises:
        RuntimeError: it does not start.
    """
    path = os.pathsep.join(path for path in sys.path if path)  # what tasks import may be anywhere on it
    process = subprocess.Popen(
        [sys.executable, str(_PROGRAM)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C is the caller's to handle
    )
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        process.kill()
        process.communicate()
        raise RuntimeError(
            f"the process for work that may take long does not start: run {_PROGRAM} to see why"
        )
    return process


processes = TaskProcesses(max(2, min(4, (os.cpu_count() or 2) // 4)))
atexit.register(processes.end)
