"""Finds where else a passage was computed: ranges of stored sequences, by their content.

Nothing is stored for this: the index is made from the tokens of the store's entries, and follows their
changes. A passage has the same places wherever it stands and whatever is before it: winnowing (Schleimer,
Wilkerson, Aiken, SIGMOD 2003).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv.kv.block import KVBlock
from mixedkv.llama import Llama
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.store import Identity, KVStore
from mixedkv.store.results import Match
from mixedkv.tokens import Tokens, common_prefix

WIDTH = 16  # tokens of a fingerprint
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SENTENCE, _LINE, _MESSAGE = 1, 2, 3
_SENTENCE_ENDS = tuple(text.encode() for text in (".", "!", "?", "。", "！", "？"))  # noqa: RUF001


class TextEnds:
    """Tells by token id what ends with a token: 0 nothing, 1 a sentence, 2 a line, 3 a message."""

    def __init__(self, llm: Llama) -> None:
        self._vocab = _llama_cpp.vocab(llm)
        self._kinds = np.full(llm.n_vocab(), -1, np.int8)
        self._llm = llm

    def of(self, tokens: Tokens) -> npt.NDArray[np.int8]:
        """Return the kind of end for each token, int8 [n]."""
        unknown = np.unique(tokens[self._kinds[tokens] < 0])
        for token in unknown.tolist():
            self._kinds[token] = self._look(token)
        kinds: npt.NDArray[np.int8] = self._kinds[tokens]
        return kinds

    def _look(self, token: int) -> int:
        if llama_cpp.llama_vocab_is_control(self._vocab, token):
            return _MESSAGE if llama_cpp.llama_vocab_is_eog(self._vocab, token) else 0
        text = self._llm.detokenize([token])
        if b"\n" in text:
            return _LINE
        return _SENTENCE if text.rstrip(b" \"')").endswith(_SENTENCE_ENDS) else 0


def slide(ends: npt.NDArray[np.int8], begin: int, end: int, window: int) -> tuple[int, int]:
    """Return the part of [begin, end) that begins and ends at the edge of a message, a line or a sentence, in
    this order of preference, dropping at most `window` tokens on either side.
    """
    after = ends[max(0, begin - 1) : min(end, begin + window)]  # what ends before each place
    before = ends[max(begin, end - 1 - window) : end][::-1]
    if len(after) and begin > 0 and after.max() > 0:
        begin += int(np.argmax(after == after.max()))
    if len(before) and before.max() > 0:
        end -= int(np.argmax(before == before.max()))
    return begin, max(begin, end)


def find_fingerprints(tokens: Tokens, chunk_size: int) -> npt.NDArray[np.int64]:
    """Return the places by whose next `WIDTH` tokens a passage is found, ascending.

    Winnowing: of the hashes of each `WIDTH` consecutive tokens, the least in each window of chunk_size -
    WIDTH + 1 hashes. So two texts that share chunk_size tokens have a place in common there.
    """
    if len(tokens) < WIDTH:
        return np.empty(0, np.int64)
    hashes = _hashes(tokens)
    window = min(len(hashes), chunk_size - WIDTH + 1)
    views = np.lib.stride_tricks.sliding_window_view(hashes, window)
    least = views.argmin(axis=1) + np.arange(len(views))
    places: npt.NDArray[np.int64] = np.unique(least)
    return places


def _hashes(tokens: Tokens) -> npt.NDArray[np.uint64]:
    """Return the hash of each `WIDTH` consecutive tokens."""
    n = len(tokens) - WIDTH + 1
    ids = tokens.astype(np.uint64) + np.uint64(1)
    hashes = np.zeros(n, np.uint64)
    with np.errstate(over="ignore"):
        for i in range(WIDTH):
            hashes = (hashes ^ ids[i : i + n]) * _MULTIPLIER
            hashes ^= hashes >> np.uint64(29)
    return hashes


@dataclass(frozen=True, slots=True, eq=False)
class Donor:
    """A place in a stored sequence.

    Args:
        source: the sequence from its first token on.
        at: the position.
        left: chained hash of all tokens before it: donors with equal hashes have equal rows.
    """

    source: Match
    at: int
    left: bytes

    def common_left(self, before: Tokens) -> int:
        """Return how many tokens before the passage equal those before its place in the prompt."""
        return common_prefix(self.source.tokens[: self.at][::-1], before[::-1])

    def common_right(self, tokens: Tokens) -> int:
        """Return how many tokens from the passage on equal the given ones."""
        return common_prefix(self.source.tokens[self.at :], tokens)


class DonorIndex:
    """Index of the passages of one identity (one model, setting and tenant) by the hash of their content.

    Args:
        store: the store that has the entries.
        identity: of the entries.
        chunk_size: passages of this many tokens are always found; at least 2 * WIDTH.
        max_donors: maximum number of places that are remembered for a fingerprint.
    """

    def __init__(self, store: KVStore, identity: Identity, *, chunk_size: int, max_donors: int) -> None:
        self._store, self._identity = store, identity
        self._chunk_size, self._max_donors = chunk_size, max_donors
        self._seen: set[str] = set()
        self._donors: dict[bytes, list[Donor]] = {}

    def __len__(self) -> int:
        return len(self._donors)

    def places(self, tokens: Tokens) -> list[int]:
        """Return the places in a prompt for which there may be donors."""
        found: list[int] = find_fingerprints(tokens, self._chunk_size).tolist()
        return found

    def refresh(self) -> None:
        """Index the entries that were stored since the last call."""
        for source in self._store.sequences(self._identity, known=self._seen):
            self._seen.add(source.entry)
            left, before = self._hash(b"left"), 0
            for at in self.places(source.tokens):
                left, before = self._hash(left, source.tokens[before:at]), at
                self._add(Donor(source, at, left))

    def find(self, tokens: Tokens, at: int) -> list[Donor]:
        """Return the donors for the tokens from `at` on, the best first: those with the longest common left
        context, then those from within a conversation instead of the beginning of a sequence, then those that
        agree longest.
        """
        found = []
        for donor in self._donors.get(self._hash(b"content", tokens[at : at + WIDTH]), ()):
            left, right = donor.common_left(tokens[:at]), donor.common_right(tokens[at:])
            if right >= WIDTH:
                conversation = donor.at - left >= WIDTH and left + right >= self._chunk_size
                found.append(((left, conversation, right), donor))
        return [donor for _, donor in sorted(found, key=lambda each: each[0], reverse=True)]

    def read(self, source: Match, p0: int, p1: int) -> list[KVBlock] | None:
        """Return the cold rows of positions [p0, p1) of a stored sequence. Return None if some belong to an
        image, at whose seams no text could be evaluated, or if they are gone, and then forget the donor.
        """
        links = tuple(replace(link, end=min(link.end, p1)) for link in source.links if link.p0 < p1)
        cut = replace(source, tokens=source.tokens[:p1], links=links)
        found = self._store.read_from(cut, begin=p0)
        if found is None:
            self._forget(source.entry)
            return None
        blocks = [block.slice(max(p0, block.p0), block.p1) for block in found[0]]
        return [block.without_hot() for block in blocks] if all(block.is_text for block in blocks) else None

    def _add(self, donor: Donor) -> None:
        content = donor.source.tokens[donor.at : donor.at + WIDTH]
        donors = self._donors.setdefault(self._hash(b"content", content), [])
        donors[:] = [donor, *(other for other in donors if other.left != donor.left)]
        if len(donors) > self._max_donors:  # the one with least before it goes, of equals the oldest
            donors.remove(min(reversed(donors), key=lambda each: each.at))

    def _forget(self, entry: str) -> None:
        for donors in self._donors.values():
            donors[:] = [donor for donor in donors if donor.source.entry != entry]
        self._donors = {key: donors for key, donors in self._donors.items() if donors}

    def _hash(self, head: bytes, chunk: Tokens | None = None) -> bytes:
        data = b"" if chunk is None else chunk.astype("<i4").tobytes()
        return hashlib.blake2b(self._identity.digest + head + data, digest_size=16).digest()


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
