"""Engines that compute on the same cores do so by turns."""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """A lock that is given to who has waited the longest: two engines that are both at work step alternately,
    each with all threads. Each on threads of its own, at once, would wait for the other's at every layer.
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
