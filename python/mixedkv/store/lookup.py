"""Finds the longest stored prefix of some tokens.

Tokens are hashed in blocks of 32, each hash over the one before: h_0 of the identity, h_i of h_(i-1) and
block i. An entry [p0, p1) is listed under the hash at every boundary b with floor(p0 / 32) * 32 <= b <= p1.
So an entry that shares n tokens with a prompt is listed at the prompt's boundary floor(n / 32) * 32, and the
search goes through the prompt's boundaries from the last to the first. A hash only proposes an entry; a
comparison of the tokens decides.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from mixedkv.kv.block import KVBlock
from mixedkv.kv.row_setting import difference
from mixedkv.store import coverage
from mixedkv.store.encryption import Cipher
from mixedkv.store.entry_row import EntryError, EntryRow, Reason
from mixedkv.store.identity import Identity
from mixedkv.store.index import Index
from mixedkv.store.results import Link, Match
from mixedkv.tokens import Tokens, common_prefix

BLOCK = 32
_MAX_CANDIDATES = 128  # at one boundary, of the newest and of the oldest; beyond them 31 tokens can be missed
_MAX_TRIED = 1024  # in one search


def block_hashes(cipher: Cipher, identity: Identity, tokens: Tokens) -> list[bytes]:
    """Return the hash at each boundary, from 0 up to the last whole block."""
    return _extend(cipher, [cipher.digest(b"identity" + identity.digest)[:16]], tokens)


def content_hash(cipher: Cipher, hashes: list[bytes], before: Tokens, tokens: Tokens) -> bytes:
    """Return a hash that is the same only for entries of the same identity, tokens and range.

    Args:
        hashes: of `before`, from 0 to its last whole block at least.
        before: all tokens before the entry's.
        tokens: the entry's own.
    """
    p0 = len(before)
    rest = np.concatenate([before[p0 // BLOCK * BLOCK :], tokens])
    last = _extend(cipher, [hashes[p0 // BLOCK]], rest)[-1]
    tail = rest[len(rest) // BLOCK * BLOCK :].astype("<i4").tobytes()
    return cipher.digest(b"content" + last + p0.to_bytes(8, "little") + tail)[:16]


def _extend(cipher: Cipher, hashes: list[bytes], tokens: Tokens) -> list[bytes]:
    data = tokens.astype("<i4").tobytes()
    for begin in range(0, len(data) - 4 * BLOCK + 1, 4 * BLOCK):
        hashes.append(cipher.digest(hashes[-1] + data[begin : begin + 4 * BLOCK])[:16])
    return hashes


def token_context(identity: bytes, entry: str, content: bytes, rows: str) -> bytes:
    """Return the context that an entry's encrypted tokens are bound to: all of its row that decides about a
    match.
    """
    return b"tokens" + identity + entry.encode() + content + rows.encode()


def key_context(identity: bytes, entry: str) -> bytes:
    return b"key" + identity + entry.encode()


def file_context(identity: bytes, entry: str) -> bytes:
    return b"file" + identity + entry.encode()


class Listing(Protocol):
    """Protocol of what can be searched: an index, or a remote."""

    def known(self, hashes: Sequence[bytes]) -> set[bytes]: ...

    def candidates(self, block_hash: bytes, limit: int) -> list[str]: ...

    def get(self, entry: str) -> EntryRow | None: ...

    def has_other_key(self, identity: bytes, key_id: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Stored:
    row: EntryRow
    tokens: Tokens


class Search:
    """A search for one prompt. `broken` has the entries whose rows in the index turned out to be damaged."""

    def __init__(self, index: Listing, cipher: Cipher, identity: Identity, tokens: Tokens) -> None:
        self._index, self._cipher = index, cipher
        self._identity, self._tokens = identity, tokens
        self._stored: dict[str, _Stored | None] = {}
        self._agreed: dict[tuple[str, int], bool] = {}
        self._own: dict[str, bool] = {}
        self._tried: set[str] = set()
        self._hashes = block_hashes(cipher, identity, tokens)
        self.broken: dict[str, EntryError] = {}
        self.reason: Reason = "unknown"

    def find(self, exact_only: bool) -> Match | None:
        """Return the longest match; None if there is none, for the cause in `reason`."""
        hashes = self._hashes
        known = self._index.known(hashes)
        best: Match | None = None
        for i in reversed(range(len(hashes))):
            if (best is not None and best.n_tokens >= (i + 1) * BLOCK) or len(self._tried) > _MAX_TRIED:
                break
            if hashes[i] not in known:
                continue
            for entry in self._index.candidates(hashes[i], _MAX_CANDIDATES):
                if entry not in self._tried:
                    self._tried.add(entry)
                    best = _better(best, self._match(entry, exact_only, best.n_tokens if best else 0))
        if not self._tried and self._index.has_other_key(self._identity.digest, self._cipher.key_id):
            self.reason = "key"
        return best

    def match(self, entry: str) -> Match | None:
        """Return the match that ends in this entry, exact or not."""
        return self._match(entry, exact_only=False, at_least=0)

    def tokens_up_to(self, entry: str) -> Tokens | None:
        """Return the tokens of an entry after those of all it builds on; None if one is gone or damaged."""
        parts: list[Tokens] = []
        stored = self._load(entry)
        while stored is not None:
            parts.append(stored.tokens)
            if stored.row.parent is None:
                return np.concatenate(parts[::-1]) if stored.row.p0 == 0 else None
            p0, stored = stored.row.p0, self._load(stored.row.parent)
            if stored is None or not stored.row.p0 < p0 <= stored.row.p1:
                return None
            stored = replace(stored, tokens=stored.tokens[: p0 - stored.row.p0])
        return None

    def _match(self, entry: str, exact_only: bool, at_least: int) -> Match | None:
        """Return the match that ends in this entry, if it has `at_least` tokens. Entries before it are
        candidates of their own, so this looks no further back.
        """
        last = self._load(entry)
        if last is None or last.row.p0 >= len(self._tokens):
            return None
        p0 = last.row.p0
        n = p0 + common_prefix(last.tokens, self._tokens[p0:])
        if n == p0 or n < at_least:
            return None
        chain = self._chain(last)
        return None if chain is None else self._cut(chain, n, exact_only)

    def _cut(self, chain: list[_Stored], n: int, exact_only: bool) -> Match | None:
        try:
            rows = [coverage.from_text(stored.row.rows) for stored in chain]
        except EntryError as error:
            self._note_broken(chain[-1].row.id, error)
            return None
        begins = [stored.row.p0 for stored in chain]
        served = rows[-1].served_before(n)
        for end in [n, served] if begins[-1] < served < n else [n]:
            ends = [*begins[1:], end]
            verdict = coverage.verdict(self._identity, list(zip(rows, begins, ends, strict=True)), end)
            if verdict == "exact" or (verdict == "inexact" and not exact_only):
                break
            self.reason = "window" if verdict == "unusable" else "inexact"
        else:
            return None
        if not all(map(self._is_its_own, chain)):
            return None
        links = tuple(
            Link(stored.row.id, stored.row.p0, stored.row.p1, end)
            for stored, end in zip(chain, ends, strict=True)
        )
        tokens = self._tokens[: ends[-1]]
        return Match(identity=self._identity, tokens=tokens, links=links, exact=verdict == "exact")

    def _chain(self, last: _Stored) -> list[_Stored] | None:
        """Return an entry after all that it builds on, if the tokens before it are the prompt's."""
        stored: _Stored | None = last
        chain: list[_Stored] = []
        while stored is not None:
            chain.append(stored)
            p0 = stored.row.p0
            if stored.row.parent is None:
                return chain[::-1] if p0 == 0 else None
            stored = self._load(stored.row.parent)
            if stored is None:
                self._note_broken(chain[-1].row.id, EntryError("missing", "what it builds on is gone"))
                return None
            if not stored.row.p0 < p0 <= stored.row.p1 or not self._agrees(stored, p0):
                return None
        return None

    def _is_its_own(self, stored: _Stored) -> bool:
        """Return whether an entry was computed after the prompt's tokens before it."""
        row = stored.row
        if row.id not in self._own:
            content = content_hash(self._cipher, self._hashes, self._tokens[: row.p0], stored.tokens)
            self._own[row.id] = content == row.content
            if not self._own[row.id]:
                self._note_broken(
                    row.id, EntryError("damaged", "it is listed behind tokens that are not its")
                )
        return self._own[row.id]

    def _agrees(self, stored: _Stored, end: int) -> bool:
        """Return whether an entry's tokens up to `end` are the prompt's."""
        key = stored.row.id, end
        if key not in self._agreed:
            p0 = stored.row.p0
            self._agreed[key] = np.array_equal(stored.tokens[: end - p0], self._tokens[p0:end])
        return self._agreed[key]

    def _load(self, entry: str) -> _Stored | None:
        if entry not in self._stored:
            self._stored[entry] = self._read(entry)
        return self._stored[entry]

    def _read(self, entry: str) -> _Stored | None:
        try:
            row = self._index.get(entry)
            if row is None:
                raise EntryError("damaged", "its row in the index is not what was written")
            if row.key_id != self._cipher.key_id:  # by a program with another key than ours, old or new
                self.reason = "key"
                return None
            return _Stored(row, self._row_tokens(row))
        except EntryError as error:
            self._note_broken(entry, error)
            return None

    def _note_broken(self, entry: str, error: EntryError) -> None:
        self.broken[entry] = error
        self.reason = error.reason

    def _row_tokens(self, row: EntryRow) -> Tokens:
        if row.identity != self._identity.digest:
            raise EntryError("identity", "it is listed under another identity")
        key = self._cipher.open_key(row.key, key_context(row.identity, row.id))
        context = token_context(row.identity, row.id, row.content, row.rows)
        data = self._cipher.unseal(key, row.tokens, context)
        if len(data) != 4 * (row.p1 - row.p0):
            raise EntryError("damaged", "its tokens in the index do not fit its range")
        return np.frombuffer(data, "<i4").astype(np.int32, copy=False)


def stored_sequences(index: Index, cipher: Cipher, identity: Identity, known: Collection[str]) -> list[Match]:
    """Return a match of each whole sequence that is stored under an identity; see `Entries.sequences`."""
    walk = Search(index, cipher, identity, np.empty(0, np.int32))
    found = []
    for entry in index.leaves_of(identity.digest):
        if entry not in known and (tokens := walk.tokens_up_to(entry)) is not None:
            match = Search(index, cipher, identity, tokens).match(entry)
            if match is not None:
                found.append(match)
    return found


def sequence_of(index: Index, cipher: Cipher, identity: Identity, entry: str | None, n: int) -> Match | None:
    """Return a match with the first n tokens of the sequence that ends in an entry; None if it has fewer."""
    if entry is None:
        return None
    tokens = Search(index, cipher, identity, np.empty(0, np.int32)).tokens_up_to(entry)
    if tokens is None or len(tokens) < n:
        return None
    match = Search(index, cipher, identity, tokens[:n]).match(entry)
    return match if match is not None and match.n_tokens == n else None


def _better(best: Match | None, other: Match | None) -> Match | None:
    """Return the better match: the longer one, then the exact one, then the one of fewer entries."""
    if best is None or other is None:
        return best or other

    def rank(match: Match) -> tuple[int, bool, int]:
        return match.n_tokens, match.exact, -len(match.links)

    return other if rank(other) > rank(best) else best


def check_block(block: KVBlock, link: Link, match: Match) -> None:
    """Check that the file has the expected tokens and rows of the identity's setting, which decides."""
    if (block.p0, block.p1) != (link.p0, link.p1):
        raise EntryError("tokens", f"its file has positions {block.p0} to {block.p1}")
    if not np.array_equal(block.tokens[: link.end - link.p0], match.tokens[link.p0 : link.end]):
        raise EntryError("tokens", "its file has other tokens")
    if block.n_exact and match.identity.setting and block.setting != match.identity.setting:
        reason = difference(block.setting, match.identity.setting)
        raise EntryError("identity", f"its rows were computed under another setting: {reason}")


def worth_building_on(match: Match | None, window: int) -> Match | None:
    """Return the part of a match that is worth building on. A last entry of which only a few tokens would be
    used is left out, since it would be read whole. Of an inexact match only the part before the window is
    used, as the window's rows are stored again in F16.
    """
    if match is None:
        return None
    links = match.links
    if not match.exact:
        links = tuple(replace(link, end=min(link.end, window)) for link in links if link.p0 < window)
    while links and links[-1].end < links[-1].p1 and links[-1].end - links[-1].p0 < BLOCK:
        links = links[:-1]
    if not links:
        return None
    return replace(match, links=links, tokens=match.tokens[: links[-1].end])
