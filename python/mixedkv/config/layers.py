"""Writes types of single layers: "0-3:q8_0/q8_0,4-:q4_0" has q8_0 in the first four layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby


def join_layers(types: Iterable[tuple[int, str, str]]) -> str:
    """Return the short form of (layer, type of K, type of V), in order; equal neighbours are one range."""
    in_range = groupby(enumerate(types), lambda each: (each[1][0] - each[0], each[1][1:]))
    ranges = [(pair, [il for _, (il, *_) in each]) for (_, pair), each in in_range]
    return ",".join(
        f"{il[0]}{'' if len(il) == 1 else f'-{il[-1]}'}:{k if k == v else f'{k}/{v}'}"
        for (k, v), il in ranges
    )


def shorten(types: Sequence[tuple[int, str, str]]) -> tuple[str, str, str]:
    """Return the commonest types of K and V, and the short form of the layers that have others."""
    (type_k, type_v), _ = Counter(each[1:] for each in types).most_common(1)[0]
    return type_k, type_v, join_layers(each for each in types if each[1:] != (type_k, type_v))
