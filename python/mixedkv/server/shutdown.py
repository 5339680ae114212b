"""The end of the process, whatever hangs."""

from __future__ import annotations

import logging
import os
import threading

log = logging.getLogger("mixedkv.server")


def end_within(seconds: float) -> None:
    """End the process with exit code 1 when it is still there after so many seconds: threads that wait for a
    disk or a database cannot be cancelled, and Python waits for them.
    """
    timer = threading.Timer(seconds, _end, (seconds,))
    timer.daemon = True  # it holds nothing up itself
    timer.start()


def _end(seconds: float) -> None:
    names = sorted(thread.name for thread in threading.enumerate() if not thread.daemon)
    log.error(
        "the shutdown took more than %g seconds and is given up; at work: %s", seconds, ", ".join(names)
    )
    os._exit(1)
