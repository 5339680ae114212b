"""Chooses which tokens of reused chunks are evaluated again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mixedkv.chunks.chunk_reuse import REPAIRS, Repair
from mixedkv.chunks.donors import Segment
from mixedkv.limits import check_int

Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]

USUAL: Repair = "seam"
_RATIOS: dict[Repair, float] = {"none": 0.0, "seam": 0.0, "cacheblend": 0.15, "query": 0.15}
# What has to be evaluated of any prompt is less of a long one. With each hundred tokens beyond the first
# thousand "query" evaluates a hundredth more, and all of it stays at half of a cold prompt.
_SHORT, _MOST = 1000, 0.25
_CHOOSING: tuple[Repair, ...] = ("cacheblend", "query")  # those that choose a share of the tokens
_LOOKED_AT = 1.0  # weight of a token's attention beside its worth without any
_ROUNDS = 60  # some ten are enough
_OVERLAPS: dict[Repair, int] = {"none": 0, "seam": 16, "cacheblend": 0, "query": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A method of repairing the seams of reused passages.

    Args:
        repair: "none": not at all, as llama-server's --cache-reuse. "seam": the first and the last
            `overlap_k` tokens of each segment (EPIC, arXiv:2410.15332, has the first). "cacheblend": tokens
            whose V deviates most in the second layer from what the whole prompt gives there (CacheBlend,
            arXiv:2405.16444). "query": tokens near the beginning of each segment, and those that the question
            (as in ProphetKV, arXiv:2602.02579) and the first tokens of an answer look at, some of every part;
            the other rows are moved by what changed in these.
        ratio: share of the reused tokens that "cacheblend" and "query" choose. None: 0.15, of "query" 0.15 to
            0.25 by the length of the prompt.
        overlap_k: None: 4 for "query", 16 for "seam".

    Raises:
        ValueError: a value is out of range, or the repair has no such setting.
    """

    repair: Repair = USUAL
    ratio: float | None = None
    overlap_k: int | None = None

    def __post_init__(self) -> None:
        if self.repair not in REPAIRS:
            raise ValueError(f"repair={self.repair!r}: use one of {', '.join(REPAIRS)}")
        ratio = self.ratio
        overlap = _OVERLAPS[self.repair] if self.overlap_k is None else self.overlap_k
        if ratio is not None:
            if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
                raise ValueError(f"ratio={ratio!r}: use a number from 0 to 1")
            if self.repair not in _CHOOSING:
                raise ValueError(
                    f"ratio={ratio:g}: repair={self.repair!r} has none: use {_either(_CHOOSING)}"
                )
            object.__setattr__(self, "ratio", float(ratio))
        if self.overlap_k and self.repair == "none":
            raise ValueError(
                f"overlap_k={self.overlap_k}: repair='none' has none: use {_either(REPAIRS[1:])}"
            )
        object.__setattr__(self, "overlap_k", check_int("overlap_k", overlap, 0, 1024))

    def __str__(self) -> str:
        if self.repair in ("none", "seam"):
            return self.repair if self.repair == "none" else f"seam {self.overlap}+{self.overlap}"
        return self.repair if self.ratio is None else f"{self.repair} {100 * self.ratio:g}%"

    def share_of(self, n: int) -> float:
        """Return the share of the reused tokens of a prompt of `n` tokens that is evaluated again."""
        if self.ratio is not None:
            return self.ratio
        least = _RATIOS[self.repair]
        return min(_MOST, least + max(0, n - _SHORT) / 10_000) if self.repair == "query" else least

    @property
    def overlap(self) -> int:
        assert self.overlap_k is not None
        return self.overlap_k


def _either(repairs: Sequence[str]) -> str:
    return " or ".join(repairs)


def at_seams(segments: Sequence[Segment], n: int, *, first: int, last: int) -> Mask:
    """Return the first and last tokens of each segment, bool [n]."""
    mask = np.zeros(n, np.bool_)
    for segment in segments:
        mask[segment.begin : min(segment.end, segment.begin + first)] = True
        mask[max(segment.begin, segment.end - last) : segment.end] = True
    return mask


def benefit(looks: Floats, segments: Sequence[Segment], overlap: int) -> Floats:
    """Return the benefit of evaluating each token, float32 [n]: how far its row is expected to be off, which
    falls with the distance from the beginning of its segment, times how much it is looked at. Tokens that the
    question passes over count like those it looks at on average: others look at them.

    Args:
        looks: attention of the question and the draft, as a multiple of the mean, float32 [n].
        segments: of the prompt.
        overlap: tokens at the beginning of a segment that are off by the same.
    """
    scores = np.zeros(len(looks), np.float32)
    for each in segments:
        distance = np.arange(len(each)) + max(1, overlap)
        scores[each.begin : each.end] = (_LOOKED_AT * looks[each.begin : each.end] + 1) / distance
    return scores


def spread(scores: Floats, looks: Floats, among: Mask, share: float) -> Mask:
    """Choose a share of the `among` positions, of each part of them as many as it is worth (bool [n]).

    The positions are cut in order into parts of the same worth. Each gives the one that is looked at most.
    Rows between are corrected by the chosen ones, so these must not be all in one place.
    """
    at, mask = np.flatnonzero(among), np.zeros(len(scores), np.bool_)
    n = round(share * len(at))
    if not n:
        return mask
    scale, benefits = 1.0, scores[at].astype(np.float64)
    for _ in range(_ROUNDS):  # until what is worth more than a part counts as one
        scale *= n / max(np.minimum(1, scale * benefits).sum(), 1e-9)
    shares = np.minimum(1, scale * benefits)
    part = np.floor(np.cumsum(shares) - shares / 2).clip(0, n - 1).astype(np.int64)
    order = np.lexsort((-looks[at], part))
    _, first = np.unique(part[order], return_index=True)
    mask[at[order[first]]] = True
    rest = among & ~mask  # where a part has no middle of a token in it
    return mask | most(scores, rest, (n - int(mask.sum())) / max(1, int(rest.sum())))


def most(scores: npt.NDArray[np.float32], among: Mask, share: float) -> Mask:
    """Return the positions with the highest scores, a share of those that are `among`, bool [n]."""
    mask = np.zeros(len(scores), np.bool_)
    n = round(share * int(among.sum()))
    if n:
        ranked = np.where(among, scores, -np.inf)
        mask[np.argpartition(-ranked, n - 1)[:n]] = True
    return mask & among
