"""Processes that only compute beside what is measured: a machine with other work to do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_COMPUTE = "while True: pass"


@contextmanager
def neighbours(n: int) -> Iterator[list[int]]:
    """Run `n` busy processes for as long as the block runs; gives their process ids."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(n):
            processes.append(subprocess.Popen([sys.executable, "-I", "-S", "-c", _COMPUTE]))
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
