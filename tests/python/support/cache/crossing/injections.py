"""Faults in the middle of an evaluation: an abort callback, a signal, a file that cannot be read."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import llama_cpp

import mixedkv
from mixedkv import Llama

_PACKAGE = Path(mixedkv.__file__).parent


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
    """A signal comes, and its handler raises if it interrupts the package; it leaves our own books alone."""
    armed = True

    def handler(_number: int, frame: FrameType | None) -> None:
        if armed and _is_in_package(frame):
            raise RaisedError

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))  # it may come before the next line
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _is_in_package(frame: FrameType | None) -> bool:
    """Whether a call of the package is interrupted, but not one that computes what is compared."""
    files: set[Path] = set()
    while frame is not None:
        files.add(Path(frame.f_code.co_filename))
        frame = frame.f_back
    return Path(__file__).with_name("lineage.py") not in files and any(
        _PACKAGE in file.parents for file in files
    )


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
