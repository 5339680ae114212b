"""Bounds what compiling a constraint may take, whatever is in it: it is compiled on trial in a process that
is ended when that takes too long. A thread of llguidance's cannot be stopped.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

SECONDS = 3.0  # of a processor
STEP_SECONDS = 0.25  # of a processor, for a mask and a token: all answers wait for it
_STEPS = 4  # tokens
_CLOCK_SECONDS = 60.0  # on the clock, where no processor is free
_BYTES = 4 << 30  # address space of the process; a thread's stack and llguidance's arenas count
_PROCESSES = 2
_KEPT = 1024  # constraints whose outcome is known

_KILL = 9  # by the clock, or by a system that runs out of memory
_PROGRAM = Path(__file__).with_name("trial_process.py")


class _Process:
    """A process that tries one constraint at a time. It starts with the first one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self.lock = threading.Lock()

    def ask(self, request: str) -> str | None:
        """Return the answer to a request; None if the process ended over it.

        Raises:
            RuntimeError: the process does not start.
            KilledError: it was killed, which need not be the request's doing.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = _start()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(_CLOCK_SECONDS, process.kill)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        finally:
            timer.cancel()
        if line.endswith("\n"):
            return line.strip()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_CLOCK_SECONDS)  # the end of its output is its own end
        self.end()
        if process.returncode == -_KILL:
            raise KilledError(f"compiling it was not done within {_CLOCK_SECONDS:g} seconds: try again later")
        return None

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


class KilledError(ValueError):
    """A process was killed: no processor was free for long, or the system has no memory left."""


def _start() -> subprocess.Popen[str]:
    path = os.pathsep.join(path for path in sys.path if path)  # llguidance may be anywhere on it
    process = subprocess.Popen(
        [sys.executable, str(_PROGRAM), str(_BYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C is the caller's to handle
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        process.kill()
        process.communicate()
        raise RuntimeError(f"the process that tries constraints does not start: run {_PROGRAM} to see why")
    return process


_processes = [_Process() for _ in range(_PROCESSES)]
_free = threading.Semaphore(_PROCESSES)
_known: OrderedDict[bytes, str] = OrderedDict()  # why a constraint is refused, "" if it is not
_knowing = threading.Lock()


def check(lark: str, names: list[str], limits: dict[str, Any]) -> None:
    """Refuse a grammar that takes too long to compile, too much memory, or too long for its first tokens.

    Args:
        names: names of the control tokens in it.
        limits: fields of llguidance's `LLParserLimits`.

    Raises:
        ValueError: it takes too much; the message says of what. Another time it may not, if that was found
            on the clock.
    """
    request = json.dumps(
        {
            "lark": lark,
            "names": names,
            "limits": limits,
            "seconds": SECONDS,
            "step_seconds": STEP_SECONDS,
            "steps": _STEPS,
        }
    )
    key = hashlib.sha256(request.encode()).digest()
    with _knowing:
        refusal = _known.get(key)
        if refusal is not None:
            _known.move_to_end(key)
    if refusal is None:
        refusal = _try(request)
        with _knowing:
            _known[key] = refusal
            while len(_known) > _KEPT:
                _known.popitem(last=False)
    if refusal:
        raise ValueError(refusal)


def _try(request: str) -> str:
    """Return why a constraint is refused, "" if it is not."""
    with _free:
        process = next(each for each in _processes if each.lock.acquire(blocking=False))
        try:
            found = process.ask(request)
        finally:
            process.lock.release()
    if found is None:
        return (
            f"compiling it takes more than {SECONDS:g} seconds or {_BYTES >> 30} GiB: use fewer patterns, "
            "alternatives and combinations"
        )
    if found:
        return f"a token of it takes more than {STEP_SECONDS:g} seconds: use fewer alternatives"
    return ""


def _end_all() -> None:
    for process in _processes:
        process.end()


atexit.register(_end_all)
