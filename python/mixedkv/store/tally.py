"""Counts the hits and misses of a store."""

from __future__ import annotations

from collections import Counter
from threading import Lock
from typing import Any

from mixedkv.store.results import Tier


class Tally:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._hits: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._tokens_hit = self._n_restored = 0
        self._n_rechecked = self._n_wrong = 0
        self._seconds = 0.0

    def hit(self, tier: Tier, n_tokens: int) -> None:
        with self._lock:
            self._hits[tier] += 1
            self._tokens_hit += n_tokens

    def miss(self, reason: str) -> None:
        with self._lock:
            self._misses[reason] += 1

    def restored(self, seconds: float) -> None:
        with self._lock:
            self._n_restored += 1
            self._seconds += seconds

    def rechecked(self, n_right: int, n_wrong: int) -> None:
        """Count entries of which tokens were evaluated again."""
        with self._lock:
            self._n_rechecked += n_right + n_wrong
            self._n_wrong += n_wrong

    def stats(self) -> dict[str, Any]:
        """Return the tally's part of `StoreStats`."""
        with self._lock:
            return {
                "hits": dict(self._hits),
                "misses": dict(self._misses),
                "tokens_hit": self._tokens_hit,
                "n_restored": self._n_restored,
                "seconds_restoring": self._seconds,
                "n_rechecked": self._n_rechecked,
                "n_wrong": self._n_wrong,
            }
