"""Lets engines that share cores compute by turns."""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """A lock that goes to the engine that has waited the longest, so that two busy engines step alternately,
    each with all threads. If both computed at once, each would wait for the other's threads at every layer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            turn = threading.Event()
            self._waiting.append(turn)
        turn.wait()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._taken = False
