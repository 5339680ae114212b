"""Token ids as arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


def as_tokens(tokens: npt.ArrayLike, name: str = "tokens") -> Tokens:
    """Copy token ids to an array, int32 [n].

    Args:
        name: what the caller names them.

    Raises:
        ValueError: they are no flat list of whole numbers.
    """
    try:
        ids = np.asarray(tokens)
    except ValueError:  # lists of several lengths
        ids = np.array(None)
    limits = np.iinfo(np.int32)
    if ids.size == 0 and ids.ndim == 1:
        return np.empty(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < limits.min or ids.max() > limits.max:
        raise ValueError(f"{name}={tokens!r:.80}: give a flat list of token ids")
    return ids.astype(np.int32)


def check_tokens(name: str, tokens: npt.ArrayLike, n_vocab: int) -> list[int]:
    """Return token ids as a list.

    Raises:
        ValueError: as `as_tokens`, or one is not of this vocabulary.
    """
    ids = as_tokens(tokens, name)
    if (bad := ids[(ids < 0) | (ids >= n_vocab)]).size:
        raise ValueError(f"{name}: token {bad[0]} is not one of this model's {n_vocab}")
    listed: list[int] = ids.tolist()
    return listed


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Return how many tokens two sequences begin with alike."""
    n = min(len(a), len(b))
    if n == 0 or a[0] != b[0]:  # as for most of the many that branch off at one place
        return 0
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n
