"""Token ids as arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


def as_tokens(tokens: npt.ArrayLike) -> Tokens:
    """Copy token ids to an array, int32 [n].

    Raises:
        ValueError: they are no flat list of whole numbers.
    """
    ids = np.asarray(tokens)
    if ids.size == 0:
        return np.empty(0, np.int32)
    limits = np.iinfo(np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < limits.min or ids.max() > limits.max:
        raise ValueError("tokens: give a flat list of token ids")
    return ids.astype(np.int32)


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Return how many tokens two sequences begin with alike."""
    n = min(len(a), len(b))
    if n == 0 or a[0] != b[0]:  # as for most of the many that branch off at one place
        return 0
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n
