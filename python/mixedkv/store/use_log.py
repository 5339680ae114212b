"""Remembers which entries were used, and how often, until the next change: reading writes nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from threading import Lock

from mixedkv.store.index import Index


class UseLog:
    """The entries that were used since the last change. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._used: dict[str, float] = {}
        self._uses: Counter[str] = Counter()

    def note(self, entries: Iterable[str]) -> None:
        named = list(entries)
        with self._lock:
            self._used.update(dict.fromkeys(named, time.time()))
            self._uses.update(named)

    def write(self, index: Index) -> None:
        with self._lock:
            used, self._used = self._used, {}
            uses, self._uses = self._uses, Counter()
        index.touch(used, uses)
