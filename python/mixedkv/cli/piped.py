"""Reads what another program or a file gives on standard input."""

from __future__ import annotations

import contextlib
import os
import stat
import sys

from mixedkv import system

_SOON = 0.5  # seconds in which a program that pipes something in has begun
_LATE = 3.0


def read_stdin() -> bytes:
    """Return all of standard input; nothing where it is closed."""
    if sys.stdin is None:
        return b""
    return sys.stdin.buffer.read()


def read_piped(*, wait: bool) -> bytes | None:
    """Return what is piped in, or redirected from a file; None where standard input is a terminal, another
    device, closed, or empty.

    Args:
        wait: wait for the end of a pipe however late its first byte comes, and say so. Otherwise a pipe that
            has nothing soon counts as empty: who started the program may have left it open.
    """
    if (mode := _mode()) is None or not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISREG(mode)):
        return None
    if not stat.S_ISREG(mode) and not system.has_data(sys.stdin, _LATE if wait else _SOON):
        if not wait:
            return None
        print(
            "mixedkv: waiting for the end of standard input, which is a pipe (< /dev/null gives none)",
            file=sys.stderr,
        )
    return read_stdin() or None


def _mode() -> int | None:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or replaced by what is no file
        return os.fstat(sys.stdin.fileno()).st_mode
    return None
