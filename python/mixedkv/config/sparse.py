"""`sparse="eps:0.05/0.05"`: how far the attention of a decoded token may be wrong, and how often farther."""

from __future__ import annotations

import math
from statistics import NormalDist

_METHOD = "eps:"
_DELTA = 0.05
_LEAST = 1e-6
_MOST_DELTA = 0.3  # E is then still a standard error, and more would be no promise


def normal_sparse(value: str) -> str:
    """Return the setting as it is written: "" or "eps:E/D", where D need not be given.

    Raises:
        TypeError: it is no text.
        ValueError: it is another method, or E or D is out of range.
    """
    if not isinstance(value, str):
        raise TypeError(f"sparse={value!r}: use text such as 'eps:0.05', or '' for none")
    text = value.strip().lower()
    if not text:
        return ""
    try:
        error, delta = _numbers(text)
    except ValueError:
        error = delta = math.nan
    if not (text.startswith(_METHOD) and _LEAST <= error < 1 and _LEAST <= delta <= _MOST_DELTA):
        raise ValueError(
            f"sparse={value}: use eps:E or eps:E/D, as eps:0.05, with E from {_LEAST:f} to below 1 and D "
            f"from {_LEAST:f} to {_MOST_DELTA}. The sum of a query's attention weights is wrong by more than "
            f"a share E with a probability of at most D, {_DELTA} if left out"
        )
    return f"{_METHOD}{error}" if delta == _DELTA else f"{_METHOD}{error}/{delta}"


def standard_error(value: str) -> float:
    """Return the standard error of a setting that `normal_sparse` made, 0 for none.

    A normally distributed error is beyond E with the probability D.
    """
    if not value:
        return 0.0
    error, delta = _numbers(value)
    return error / NormalDist().inv_cdf(1 - delta / 2)


def _numbers(text: str) -> tuple[float, float]:
    error, slash, delta = text.removeprefix(_METHOD).partition("/")
    return float(error), float(delta) if slash else _DELTA
