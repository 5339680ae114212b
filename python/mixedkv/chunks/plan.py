"""Plans which tokens of a prompt take their rows from which stored sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mixedkv.chunks.donors import Donor, DonorIndex
from mixedkv.chunks.fingerprints import slide
from mixedkv.store.results import Match
from mixedkv.tokens import Tokens

SHORTEST_SEGMENT = 32  # tokens: a shorter one is not worth its seams
SHORTEST_QUESTION = 16  # tokens at the end that are always evaluated: they choose the others


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Positions [begin, end) of a prompt whose rows come from a stored sequence, from position `at` on.

    Args:
        common_left: how many tokens before the segment are the same in both.
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
    """Return the passages of a prompt that were computed in other prompts, in order. A question is left at
    the end.

    From a place that a donor has too, a segment grows to both sides as far as the tokens agree, and is then
    cut back to the end of a sentence. Rows within a segment attended to each other, so it has seams only
    where it begins and ends.

    Args:
        index: index of donors.
        tokens: the prompt.
        ends: what ends with each token, see `fingerprints.TextEnds`.
        low: position where the first segment may begin.
        window: maximum number of tokens to cut from each side of a segment.
        shortest: minimum number of tokens of a segment.
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
