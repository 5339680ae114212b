"""Statistics of samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")

_BLOCK = 32  # neighbouring positions share a context: a block of them is one sample


def standard_error(values: npt.NDArray[np.float64]) -> float:
    """Return the standard error of the mean, from the means of blocks of neighbours. 0 with fewer than two
    blocks.
    """
    n = values.size // _BLOCK
    if n < 2:
        return 0.0
    means = values[: n * _BLOCK].reshape(n, _BLOCK).mean(axis=1)
    return float(means.std(ddof=1) / math.sqrt(n))


def wilson(correct: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95% interval of a share (E. B. Wilson, 1927, JASA 22:209)."""
    if n == 0:
        return 0.0, 1.0
    p, z2 = correct / n, z * z
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def ratio_interval(values: Sequence[float], of: Sequence[float], n: int = 10_000) -> tuple[float, float]:
    """Return the 95% bootstrap interval of the ratio of two means over the same cases, which are drawn
    together.
    """
    drawn = _drawn(len(of), n)
    return _middle(np.asarray(values)[drawn].mean(axis=1) / np.asarray(of)[drawn].mean(axis=1))


def bootstrap_interval(
    cases: Sequence[T], statistic: Callable[[Sequence[T]], float], n: int = 2000
) -> tuple[float, float]:
    """Return the 95% bootstrap interval of a statistic of cases, such as rounds."""
    return _middle([statistic([cases[i] for i in each]) for each in _drawn(len(cases), n)])


def _drawn(n_cases: int, n: int) -> npt.NDArray[np.int64]:
    """Return `n` samples of all cases, with replacement, as their indices; the same ones each time."""
    return np.random.default_rng(0).integers(0, n_cases, (n, n_cases))


def _middle(values: Sequence[float] | npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return where the middle 95% of values begin and end."""
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Compute log-softmax over the last axis, in double precision: two F16 caches differ by about 1e-6."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted
