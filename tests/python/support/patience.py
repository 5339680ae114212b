"""Waiting for what must come. The limit ends a test that hangs, and says nothing of how fast a machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 300.0  # seconds


def wait_for(what: Callable[[], object], pause: float = 0.01) -> None:
    """Look until it is so."""
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, "it did not come"
        time.sleep(pause)
