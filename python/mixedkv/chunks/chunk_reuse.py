"""Settings of reuse: what a request chooses, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from mixedkv.chunks.donors import Segment

Repair = Literal["none", "seam", "cacheblend", "query"]
REPAIRS: tuple[Repair, ...] = get_args(Repair)


@dataclass(frozen=True, kw_only=True, slots=True)
class DonorUse:
    """Positions [begin, end) of a prompt, and the stored entry and position that their rows come from.

    Args:
        common_left: how many tokens before `begin` are the same there.
    """

    begin: int
    end: int
    entry: str
    at: int
    common_left: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkReuse:
    """Tells how chunks of a prompt were put together.

    Args:
        method: how the seams were repaired.
        ratio: the share of reused tokens that the method evaluates again.
        n_exact: tokens at the prompt's beginning with exact rows, cached or evaluated.
        n_new: tokens that neither the cache nor a donor had: every method evaluates them.
        n_evaluated: tokens of the prompt that were evaluated, counting twice what was evaluated twice.
        segments: the chunks, in order.
        kept: which of the prompt's rows come from a donor, bool [n].
    """

    method: Repair
    ratio: float
    n_exact: int
    n_new: int
    n_evaluated: int
    segments: tuple[Segment, ...] = field(repr=False)
    kept: npt.NDArray[np.bool_] = field(repr=False, compare=False)

    @property
    def donors(self) -> tuple[DonorUse, ...]:
        """Stored entries that the approximate rows come from."""
        return tuple(_use(segment) for segment in self.segments)


def _use(segment: Segment) -> DonorUse:
    link = next(link for link in segment.source.links if link.end > segment.at)
    return DonorUse(
        begin=segment.begin, end=segment.end, entry=link.entry, at=segment.at, common_left=segment.common_left
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkChoice:
    """Settings of one request for the passages that it reuses; None keeps the connector's setting.

    Args:
        repair: how seams are repaired, see `Method`. A method other than the connector's has its own defaults
            for `ratio` and `overlap_k`.
        ratio: share of the reused tokens that "cacheblend" and "query" evaluate again.
        overlap_k: tokens at each edge of a passage that are evaluated again.
        chunk_size: passages shorter than half of this are not reused, and this many tokens at the beginning
            are exact. At least the connector's, whose index has no shorter ones.
        boundary_window: maximum number of tokens by which the edge of a passage moves to the end of a
            sentence.
    """

    repair: Repair | None = None
    ratio: float | None = None
    overlap_k: int | None = None
    chunk_size: int | None = None
    boundary_window: int | None = None
