"""Faults in the middle of an evaluation: an abort callback, a signal, a file that cannot be read."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import llama_cpp

from mixedkv import Llama


class RaisedError(Exception):
    """What a callback or a signal handler raises."""


class Calls:
    """Counts the calls of an abort callback; from the `last`-th on it says stop."""

    def __init__(self, last: int | None = None, raises: bool = False) -> None:
        self.n, self.last, self.raises = 0, last, raises

    def __call__(self, _data: object) -> bool:
        self.n += 1
        if self.raises and self.n == self.last:
            raise RaisedError  # ctypes reports it, and the evaluation goes on
        return not self.raises and self.last is not None and self.n > self.last


@contextmanager
def abort_callback(llm: Llama, calls: Calls) -> Iterator[Calls]:
    """Let `calls` decide whether evaluation goes on."""
    callback = llama_cpp.ggml_abort_callback(calls)
    llama_cpp.llama_set_abort_callback(llm.ctx, callback, None)
    try:
        yield calls
    finally:
        llama_cpp.llama_set_abort_callback(llm.ctx, llama_cpp.ggml_abort_callback(0), None)


@contextmanager
def signal_after(seconds: float) -> Iterator[None]:
    """A signal comes, and its handler raises; not after the block."""
    armed = True

    def handler(_number: int, _frame: FrameType | None) -> None:
        if armed:
            raise RaisedError

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
    try:
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def cut_short(path: Path, share: float) -> Iterator[None]:
    """The file ends early, and is whole again afterwards."""
    whole, status = path.read_bytes(), path.stat()
    os.truncate(path, int(len(whole) * share))
    try:
        yield
    finally:
        with path.open("r+b") as file:
            file.write(whole)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
