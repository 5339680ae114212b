"""Ends the process even if a thread hangs."""

from __future__ import annotations

import logging
import os
import threading

log = logging.getLogger("mixedkv.server")


def end_within(seconds: float) -> None:
    """End the process with exit code 1 if it still runs after so many seconds. Threads that wait for a disk
    or a database cannot be cancelled, and Python would wait for them.
    """
    timer = threading.Timer(seconds, _end, (seconds,))
    timer.daemon = True  # the timer itself delays nothing
    timer.start()


def _end(seconds: float) -> None:
    names = sorted(thread.name for thread in threading.enumerate() if not thread.daemon)
    log.error(
        "the shutdown took more than %g seconds and is given up; at work: %s", seconds, ", ".join(names)
    )
    os._exit(1)
