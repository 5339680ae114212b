"""Decides by checks of sampled requests, which compare distributions, whether chunks may be reused."""

from __future__ import annotations

import logging
import random
import statistics
from collections import deque
from dataclasses import dataclass

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv.limits import real
from mixedkv.llama import Llama
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.tokens import Tokens

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Deviation:
    """The deviation of the distribution after a prompt.

    Args:
        kld: KL divergence of the distribution with reuse from that of a full evaluation, in nats.
        same_top1: both distributions have the same likeliest token.
    """

    kld: float
    same_top1: bool


def last_logits(llm: Llama) -> Logits:
    """Return a copy of the logits of the token that was evaluated last, float32 [n_vocab]."""
    return logits_at(llm, -1)


def logits_at(llm: Llama, index: int) -> Logits:
    """Return a copy of the logits of a token of the last batch, float32 [n_vocab]."""
    pointer = llama_cpp.llama_get_logits_ith(_llama_cpp.context(llm), index)
    return np.array(np.ctypeslib.as_array(pointer, (llm.n_vocab(),)), np.float32)


def compare(exact: Logits, other: Logits) -> Deviation:
    p, q = _log_softmax(exact), _log_softmax(other)
    kld = float(np.sum(np.exp(p) * (p - q)))
    return Deviation(max(0.0, kld), bool(exact.argmax() == other.argmax()))


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64) - logits.max()
    result: npt.NDArray[np.float64] = wide - np.log(np.exp(wide).sum())
    return result


def follow(llm: Llama, n: int, forced: list[int] | None = None) -> tuple[list[int], list[Logits]]:
    """Generate n tokens from where the `Llama` stands, the likeliest or the `forced` ones. Return them, and
    the logits that each was chosen from.
    """
    tokens: list[int] = []
    logits = [last_logits(llm)]
    for i in range(n):
        tokens.append(int(logits[-1].argmax()) if forced is None else forced[i])
        if i + 1 < n:
            llm.eval([tokens[-1]])
            logits.append(last_logits(llm))
    return tokens, logits


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
        if not real("max_kld", max_kld) > 0:
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
