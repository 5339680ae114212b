"""Plans which tokens of a prompt are taken from where."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mixedkv.chunks.donors import Donor, DonorIndex
from mixedkv.chunks.fingerprints import slide
from mixedkv.store import Match
from mixedkv.tokens import Tokens

SHORTEST_SEGMENT = 32  # tokens: less is not worth its seam
SHORTEST_QUESTION = 16  # tokens at the end that are always evaluated: what chooses the others


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Positions [begin, end) of a prompt, whose rows are those of a stored sequence from position `at` on.

    Args:
        common_left: tokens before it that stood before it there too.
    """

    source: Match
    at: int
    begin: int
    end: int
    common_left: int

    def __len__(self) -> int:
        return self.end - self.begin


def find_segments(
    index: DonorIndex,
    tokens: Tokens,
    ends: npt.NDArray[np.int8],
    *,
    low: int,
    window: int,
    shortest: int = SHORTEST_SEGMENT,
) -> list[Segment]:
    """Return the passages of a prompt that were computed elsewhere, in order, with a question behind the
    last.

    From a place that a donor has too a segment grows to both sides as far as the tokens agree, and then
    slides back to where a sentence ends. Rows within a segment saw each other, so it has seams only where it
    begins and ends.

    Args:
        index: of donors.
        tokens: the prompt.
        ends: what ends with each token, see `TextEnds`.
        low: where the first may begin.
        window: tokens by which each side of a segment may slide.
        shortest: tokens of a segment that is worth its seams.
    """
    high = len(tokens) - min(SHORTEST_QUESTION, max(1, len(tokens) // 4))
    segments: list[Segment] = []
    for place in index.places(tokens):
        reached = segments[-1].end if segments else low
        if place < reached or place >= high:
            continue
        donors = index.find(tokens, place)
        if donors:
            segment = _grown(donors[0], tokens, ends, place, reached, high, window)
            if len(segment) >= shortest:
                segments.append(segment)
    return segments


def _grown(
    donor: Donor, tokens: Tokens, ends: npt.NDArray[np.int8], place: int, low: int, high: int, window: int
) -> Segment:
    common_left = donor.common_left(tokens[:place])
    begin = place - min(common_left, place - low)
    end = min(high, place + donor.common_right(tokens[place:]))
    begin, end = slide(ends, begin, end, window)
    return Segment(donor.source, donor.at + begin - place, begin, end, common_left + begin - place)


def covered(segments: list[Segment], n: int) -> npt.NDArray[np.bool_]:
    """Return which of n positions are in a segment, bool [n]."""
    mask = np.zeros(n, np.bool_)
    for segment in segments:
        mask[segment.begin : segment.end] = True
    return mask
