"""Names what a row is, as `mixedkv_truth` of the C API does, from best to worst; and writes it by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

NAMES = ("computed", "approximate", "incomplete", "foreign", "doubted")
COMPUTED, APPROXIMATE, INCOMPLETE, FOREIGN, DOUBTED = range(5)

Truth = npt.NDArray[np.uint8]


def extend_past(past: int, tokens: npt.NDArray[np.int32]) -> int:
    """Return the hash of what rows behind `tokens` are computed from.

    As `mixedkv_extend_past` does: blocks are cut where no library is loaded.
    """
    for token in tokens.tolist():
        past = (past ^ (max(token, -1) + 2)) * 0x9E3779B97F4A7C15 % 2**64
        past ^= past >> 29
    return past


def all_of(n: int, truth: int) -> Truth:
    return np.full(n, truth, np.uint8)


def runs(truth: Truth) -> list[tuple[int, int, int]]:
    """Return what rows are in runs (truth, begin, end), ascending."""
    ends = [*(np.flatnonzero(np.diff(truth)) + 1).tolist(), len(truth)]
    return [(int(truth[begin]), begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def describe_truth(truth: Truth) -> list[list[Any]]:
    """Describe what rows are, as JSON can hold it: `[["computed", 120], ["approximate", 80]]`."""
    return [[NAMES[kind], end - begin] for kind, begin, end in runs(truth)]


def read_truth(value: object, n: int) -> Truth:
    """Return what `describe_truth` was called on, of `n` rows.

    Raises:
        ValueError: it is something else.
    """
    parts: list[Any] = value if isinstance(value, list) else [None]
    for part in parts:
        if not (isinstance(part, list) and len(part) == 2 and part[0] in NAMES and type(part[1]) is int):
            raise ValueError(f"truth: {str(part)[:64]} is not one of {', '.join(NAMES)} and a number of rows")
    kinds, counts = [NAMES.index(part[0]) for part in parts], [part[1] for part in parts]
    if min(counts, default=0) < 1 or sum(counts) != n:
        raise ValueError(f"truth: it is not of {n} rows")
    return np.repeat(np.array(kinds, np.uint8), counts)
