"""Finds where else a passage was computed: ranges of stored sequences, by their content.

Nothing is stored for this: the index is made from the tokens of the store's entries, and follows their
changes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from mixedkv.chunks.fingerprints import WIDTH, find_fingerprints
from mixedkv.kv.block import KVBlock
from mixedkv.store import Identity, KVStore
from mixedkv.store.results import Match
from mixedkv.tokens import Tokens, common_prefix


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
