"""Decides by checks of sampled requests whether chunks may be reused."""

from __future__ import annotations

import logging
import random
import statistics
from collections import deque
from dataclasses import dataclass

from mixedkv.chunks.deviation import Deviation, Logits
from mixedkv.tokens import Tokens

_LOG = logging.getLogger("mixedkv.chunks")
_WAITING = 8  # requests that may wait for a check; each holds its logits
_RECENT = 32  # checks whose median decides: a mean would depend on one outlier in 32
_LEAST = 8


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that was answered with reused chunks and will be checked by an exact evaluation."""

    tokens: Tokens
    logits: Logits
    tenant: str = ""


class Gate:
    """Samples the requests to check, and stops the reuse of passages if they deviate too much.

    Args:
        max_kld: median divergence, in nats, above which chunks are no longer reused.
        check: share of the requests that are checked.
        seed: seed of the sampling.
    """

    def __init__(self, max_kld: float, check: float, seed: int | None = None) -> None:
        if not 0 < max_kld < float("inf"):
            raise ValueError(f"max_kld={max_kld}: use a positive number of nats")
        if not 0 <= check <= 1:
            raise ValueError(f"check={check}: use a share from 0 to 1")
        self._max_kld, self._check = max_kld, check
        self._random = random.Random(seed)
        self._waiting: deque[Waiting] = deque(maxlen=_WAITING)
        self._recent: deque[Deviation] = deque(maxlen=_RECENT)
        self.n_checked = 0
        self.closed = ""  # why chunks are not reused; "" while they are

    @property
    def kld_mean(self) -> float | None:
        """Mean KL divergence of the latest checks, in nats; None before the first."""
        return statistics.fmean(each.kld for each in self._recent) if self._recent else None

    @property
    def kld_median(self) -> float | None:
        """Median KL divergence of the latest checks, in nats; None before the first."""
        return statistics.median(each.kld for each in self._recent) if self._recent else None

    @property
    def same_top1(self) -> float | None:
        return statistics.fmean(each.same_top1 for each in self._recent) if self._recent else None

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def wants(self) -> bool:
        """Return whether to check the request at hand."""
        return self._check > 0 and self._random.random() < self._check

    def add(self, waiting: Waiting) -> None:
        self._waiting.append(waiting)

    def take(self) -> Waiting | None:
        return self._waiting.popleft() if self._waiting else None

    def note(self, deviation: Deviation) -> None:
        """Record the deviation of a request that was checked; close the gate where they are too large."""
        self._recent.append(deviation)
        self.n_checked += 1
        median = self.kld_median or 0.0
        if not self.closed and len(self._recent) >= _LEAST and median > self._max_kld:
            self.close(
                f"half of the last {len(self._recent)} checked requests deviate by {median:.3g} nats or "
                f"more, which is above max_kld={self._max_kld:g}"
            )

    def close(self, why: str) -> None:
        self.closed = why
        _LOG.warning("chunks are no longer reused: %s", why)
