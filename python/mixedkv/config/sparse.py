"""`sparse="eps:0.05/0.05"`: how far the attention of a decoded token may be wrong, and how often farther."""

from __future__ import annotations

import math
from statistics import NormalDist

_METHOD = "eps:"
_DELTA = 0.05


def normal_sparse(value: str) -> str:
    """Return the setting as it is written: "" or "eps:E/D", where D need not be given.

    Raises:
        TypeError: it is no text.
        ValueError: it is another method, or E or D is not between 0 and 1.
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
    if not (text.startswith(_METHOD) and 0 < error < 1 and 0 < delta < 1):
        raise ValueError(
            f"sparse={value}: use eps:E or eps:E/D with numbers between 0 and 1, as eps:0.05. The "
            f"attention's weights are wrong by more than a share E with a probability of at most D, {_DELTA} "
            "if left out"
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
