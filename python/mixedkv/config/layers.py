"""Types of single layers, and their short written form: "0-3:q8_0/q8_0,4-:q4_0"."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from mixedkv.config.row_types import replacement

_ITEM = re.compile(r"(\d{1,6})(?:(-)(\d{1,6})?)?:([a-z0-9_]+)(?:/([a-z0-9_]+))?")


@dataclass(frozen=True, slots=True)
class LayerTypes:
    """Types of K and V in the layers from `first` to `last`, which is None for the model's last one."""

    first: int
    last: int | None
    type_k: str
    type_v: str

    @property
    def layers(self) -> str:
        """The layers as a spec has them: "3", "0-3" or "4-"."""
        if self.last == self.first:
            return str(self.first)
        return f"{self.first}-{'' if self.last is None else self.last}"

    def __contains__(self, il: int) -> bool:
        return self.first <= il and (self.last is None or il <= self.last)

    def __str__(self) -> str:
        types = self.type_k if self.type_k == self.type_v else f"{self.type_k}/{self.type_v}"
        return f"{self.layers}:{types}"


@lru_cache(maxsize=256)
def parse_layers(text: str, known: tuple[str, ...]) -> tuple[LayerTypes, ...]:
    """Read ranges of layers with their types, in order of layers; "" has none.

    Raises:
        ValueError: an item is no range with types, a type is not known, or ranges overlap.
    """
    items = text.lower().replace(" ", "").split(",") if text.strip() else []
    ranges = [_parse_item(item, known) for item in items]
    ranges.sort(key=lambda each: each.first)
    for one, other in pairwise(ranges):
        if one.last is None or other.first <= one.last:
            raise ValueError(f"layers {one.layers} and {other.layers} overlap: name each layer once")
    return tuple(ranges)


def join_layers(types: Iterable[tuple[int, str, str]]) -> str:
    """Return the short form of (layer, type of K, type of V), in order; equal neighbours are one range."""
    ranges: list[LayerTypes] = []
    for il, type_k, type_v in types:
        before = ranges[-1] if ranges else None
        if before and (before.last, before.type_k, before.type_v) == (il - 1, type_k, type_v):
            ranges[-1] = LayerTypes(before.first, il, type_k, type_v)
        else:
            ranges.append(LayerTypes(il, il, type_k, type_v))
    return ",".join(map(str, ranges))


def shorten(types: Sequence[tuple[int, str, str]]) -> tuple[str, str, str]:
    """Return the commonest types of K and V, and the short form of the layers that have others."""
    (type_k, type_v), _ = Counter(each[1:] for each in types).most_common(1)[0]
    return type_k, type_v, join_layers(each for each in types if each[1:] != (type_k, type_v))


def _parse_item(item: str, known: tuple[str, ...]) -> LayerTypes:
    match = _ITEM.fullmatch(item)
    if not match:
        raise ValueError(
            f"layers: {item!r} is not a range with types: use e.g. 0-3:q8_0/q4_0, 5:q8_0 or 6-:q4_0"
        )
    start, dash, end, type_k, type_v = match.groups()
    first = int(start)
    last = int(end) if end else None if dash else first
    if last is not None and last < first:
        raise ValueError(f"layers: {item!r} ends before it begins")
    for name in (type_k, type_v or type_k):
        if name not in known:
            raise ValueError(
                f"layers: {name!r} in {item!r} is not one of {', '.join(known)}{replacement(name)}"
            )
    return LayerTypes(first, last, type_k, type_v or type_k)
