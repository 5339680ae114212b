"""Signals of a server. SIGHUP reads keys again and never ends it; SIGTERM and Ctrl-C end it once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mixedkv._signals import take_remembered

ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def reloading_at_hangup(reload: Callable[[], None]) -> Iterator[None]:
    """Call `reload` at each SIGHUP, and if one came since `remember_hangups`. Afterwards it is ignored, as in
    place of a function Python restores the default, which ends the process, before that ends by itself.
    """
    if not hasattr(signal, "SIGHUP"):  # Windows
        yield
        return
    signal.signal(signal.SIGHUP, lambda *_: reload())
    if take_remembered():
        reload()
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


@contextmanager
def holding_hangup() -> Iterator[None]:
    """Start processes in which SIGHUP is blocked from their first instruction on."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_ends() -> None:
    """Ignore the signals that end a server, while it ends."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
