"""Numbers that llama.cpp sets, ranges of settings of sampling, and what is checked by them, each in this one
place.
"""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any

INT32_MAX = 2**31 - 1  # positions, tokens and counts are int32
MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
MAX_SNAPSHOTS = 64  # of a recurrent state; each takes the memory of one
_MAX_DEPTH = 64  # of objects and lists in a schema, in arguments or variables
CELLS = 256  # a context is a multiple of so many tokens

RANGES: dict[str, tuple[float, float]] = {  # of settings of sampling: in Python, schemas, settings, options
    "temperature": (0, 100),
    "top_k": (-1, INT32_MAX),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "top_n_sigma": (-1, 1000),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "dynatemp_range": (0, 100),
    "dynatemp_exponent": (0, 100),
    "dry_multiplier": (0, 100),
    "dry_base": (0, 100),
    "dry_allowed_length": (1, INT32_MAX),
    "dry_penalty_last_n": (-1, INT32_MAX),
    "mirostat": (0, 2),
    "mirostat_tau": (0, 100),
    "mirostat_eta": (0, 1),
    "adaptive_target": (-1, 1),
    "adaptive_decay": (0, 0.99),
    "repeat_penalty": (0.01, 100),
    "repeat_last_n": (-1, INT32_MAX),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "seed": (0, 2**32 - 1),
}
WHOLE = {"top_k", "dry_allowed_length", "dry_penalty_last_n", "mirostat", "repeat_last_n", "seed"}  # of these
SAMPLERS = {  # llama.cpp's names, in its order, and its letters for them
    "penalties": "e",
    "dry": "d",
    "top_n_sigma": "s",
    "top_k": "k",
    "typ_p": "y",
    "top_p": "p",
    "min_p": "m",
    "xtc": "x",
    "temperature": "t",
    "infill": "i",
    "adaptive_p": "a",
}


def check_int(name: str, value: object, low: int = -INT32_MAX, high: int = INT32_MAX) -> int:
    """Return a whole number of any type as an int.

    Raises:
        TypeError: it is none.
        ValueError: it is less than `low` or more than `high`.
    """
    kind = "a whole number"
    if low > -INT32_MAX and high < INT32_MAX:
        kind += f" from {low} to {high}"
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}={value!r:.80}: use {kind}") from None
    if not low <= number <= high:
        allowed = f"{low} or more" if number < low else f"at most {high}"
        raise ValueError(f"{name}={number}: use {kind if ' from ' in kind else allowed}")
    return number


def real(name: str, value: object, low: float = -math.inf) -> float:
    """Return a finite number of any type as a float.

    Raises:
        TypeError: it is none.
        ValueError: it is less than `low`, infinite or NaN.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r}: use a number")
    if not math.isfinite(value) or value < low:
        least = f", {low:g} or more" if low > -math.inf else ""
        raise ValueError(f"{name}={value}: use a finite number{least}")
    return float(value)


def check_sampling(name: str, value: float, said: str = "") -> None:
    """Check that a setting of sampling is within its range.

    Args:
        said: what the caller names it, where that is not its name here.

    Raises:
        TypeError: it is not a number.
        ValueError: it is out of its range, or NaN.
    """
    low, high = RANGES[name]
    try:
        good = low <= (operator.index(value) if name in WHOLE else value) <= high  # type: ignore[arg-type]
    except TypeError:
        kind = "a whole number" if name in WHOLE else "a number"
        raise TypeError(f"{said or name}={value!r}: use {kind} from {low} to {high}") from None
    if not good:  # nor NaN
        raise ValueError(f"{said or name}={value}: use {low} to {high}")


def padded(n_ctx: int) -> int:
    """Return the context that llama.cpp makes of `n_ctx` tokens: rounded up to whole `CELLS`."""
    return -(-n_ctx // CELLS) * CELLS


def check_depth(value: Any, name: str) -> None:
    """Refuse objects and lists that are nested too deeply.

    Raises:
        ValueError: objects or lists that are nested too deep: templates go through them by recursion.
    """
    todo = [(value, 0)]
    while todo:
        item, depth = todo.pop()
        if depth > _MAX_DEPTH:
            raise ValueError(f"{name}: nested deeper than {_MAX_DEPTH} objects and lists: make it flatter")
        inner = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        todo += [(part, depth + 1) for part in inner]
