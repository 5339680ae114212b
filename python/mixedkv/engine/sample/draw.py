"""Draws from logits by temperature, top_k, top_p and min_p, as llama.cpp's samplers of these names do.

Of 262,144 tokens llama.cpp sorts all where a nucleus has more than 256, and takes exponentials one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from mixedkv.engine.sample.sampling import Sampling

Floats = npt.NDArray[np.float32]
Places = npt.NDArray[np.intp]

_BLOCK = 256  # logits of which the largest is looked for at once


class Draw:
    """The choice of one answer's tokens, with llama.cpp's random numbers for the same seed.

    Where llama.cpp sums up thousands of probabilities in 32 bits, the last tokens of a nucleus can be others.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._cuts: list[Callable[[Floats], Places]] = []  # in llama.cpp's order
        if sampling.top_k > 0:
            self._cuts.append(partial(_largest, k=sampling.top_k))
        if sampling.top_p < 1:
            self._cuts.append(partial(_nucleus, p=sampling.top_p))
        if sampling.min_p > 0:
            self._cuts.append(partial(_near_the_likeliest, p=sampling.min_p))
        self._random = np.random.RandomState(sampling.seed & 0xFFFFFFFF)  # std::mt19937's numbers

    @staticmethod
    def serves(sampling: Sampling) -> bool:
        """Return whether these settings need nothing else."""
        return sampling == Sampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            repeat_last_n=sampling.repeat_last_n,  # of a penalty that is off
            constraint=sampling.constraint,
        )

    def choose(self, logits: Floats) -> int:
        """Return the place of the chosen one of some logits, [n]."""
        best = int(logits.argmax())
        if self._sampling.greedy or not np.isfinite(logits[best]):
            return best
        left = self._cut(logits)
        x = logits if left is None else logits[left]
        i = _pick(_weights(x, self._sampling.temperature), self._uniform())
        return i if left is None else int(left[i])

    def _uniform(self) -> float:
        """Return a number from 0 to 1, made of two others as `std::uniform_real_distribution` does."""
        low, high = np.frombuffer(self._random.bytes(8), "<u4").tolist()
        return min(float(low + (high << 32)) / 2.0**64, 1.0 - 2.0**-53)

    def _cut(self, logits: Floats) -> Places | None:
        """Return the places of what is left to draw from, None for all."""
        left, x = None, logits
        for cut in self._cuts:
            kept = cut(x)
            left, x = kept if left is None else left[kept], x[kept]
        return left


def _weights(x: Floats, temperature: float = 1.0) -> Floats:
    """Return the probability of each by that of the likeliest."""
    weights: Floats = x - x.max()  # in place from here on: large arrays cost page faults
    if temperature != 1.0:
        weights /= np.float32(temperature)
    np.exp(weights, out=weights)
    return weights


def _pick(weights: Floats, u: float) -> int:
    """Return the first place up to which the weights have a share of `u`: its block first."""
    sums = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64).cumsum()
    target = u * sums[-1]
    block = _first(sums, target)
    if block:
        target -= sums[block - 1]
    begin = block * _BLOCK
    return begin + _first(weights[begin : begin + _BLOCK].cumsum(dtype=np.float64), target)


def _first(sums: npt.NDArray[np.float64], target: float) -> int:
    """Return the first place whose sum is at least this, the last one where none is."""
    return min(int(np.searchsorted(sums, target)), len(sums) - 1)


def _sorted(x: Floats, places: Places) -> Places:
    """Return places by the size of what is there, the largest first."""
    return places[np.argsort(-x[places], kind="stable")]


def _largest(x: Floats, k: int) -> Places:
    """Return the places of the `k` largest, the largest first."""
    n = len(x) // _BLOCK
    if n > k:  # the k-th largest maximum of a block: `k` elements at least are as large
        least = np.partition(x[: n * _BLOCK].reshape(n, _BLOCK).max(1), n - k)[n - k]
        places = np.flatnonzero(x >= least)
    else:
        places = np.arange(len(x))
    return _sorted(x, places)[:k]


def _nucleus(x: Floats, p: float) -> Places:
    """Return the places of the likeliest that together have a share of `p`, the likeliest first."""
    weights = _weights(x)
    total = weights.sum(dtype=np.float64)
    # all that have less than this together have less than 1 - p, and are left out
    places = _sorted(x, np.flatnonzero(weights >= total * (1.0 - p) / len(x)))
    n = int(np.searchsorted(weights[places].cumsum(dtype=np.float64), p * total)) + 1
    return places[:n]


def _near_the_likeliest(x: Floats, p: float) -> Places:
    """Return the places of those that have a share `p` of the likeliest's probability or more."""
    return np.flatnonzero(x >= x.max() + np.float32(np.log(p)))
