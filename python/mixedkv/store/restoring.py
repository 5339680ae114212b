"""Fills a sequence with the longest stored prefix of some tokens."""

from __future__ import annotations

from typing import Protocol

from mixedkv.kv.fetched import Fetched, WrongRowsError
from mixedkv.kv.row_source import RowSource
from mixedkv.store.entries import Entries
from mixedkv.store.entry_row import EXPLAINED, EntryError, Reason
from mixedkv.store.identity import Identity
from mixedkv.store.recheck import Recheck
from mixedkv.store.results import Match, Restored, Tally
from mixedkv.tokens import Tokens

_TRIES = 16  # entries that cannot be read before a restore gives up


class Found(Protocol):
    """Returns the longest usable match, or None and a reason."""

    def __call__(
        self, identity: Identity, tokens: Tokens, exact_only: bool
    ) -> tuple[Match | None, Reason]: ...


class Restorer:
    """Restores the longest usable match into a `Llama`, and counts hits and misses.

    Args:
        find: finds matches.
        entries: entries to read from.
        recheck: decides which rows are compared with the model first.
        tally: counts hits and misses.
    """

    def __init__(self, find: Found, entries: Entries, recheck: Recheck, tally: Tally) -> None:
        self._find, self._entries, self._recheck, self._tally = find, entries, recheck, tally

    def restore(
        self, llm: RowSource, tokens: Tokens, seq: int, identity: Identity, exact_only: bool
    ) -> Restored:
        """Replace the contents of a sequence, as `KVStore.restore` does."""
        missed: Restored | None = None
        for _ in range(_TRIES):
            match, reason = self._find(identity, tokens, exact_only)
            if match is None:
                return missed or self.missed(EntryError(reason, EXPLAINED.get(reason, "")))
            try:
                blocks, tier = self._entries.read(match)
                self._load(llm, seq, Fetched(blocks, tier, match.exact, self._recheck.doubt(match, llm)))
            except EntryError as error:
                missed = self.missed(error)
                if error.reason in ("refused", "index"):
                    break
            else:
                self._tally.hit(tier, match.n_tokens)
                passed_over = missed.reason if missed else ""
                return Restored(
                    n_tokens=match.n_tokens, exact=match.exact, tier=tier, seconds=0, reason=passed_over
                )
        assert missed is not None
        return missed

    def _load(self, llm: RowSource, seq: int, fetched: Fetched) -> None:
        llm.kv.remove(seq)
        try:
            while not fetched.is_loaded:
                fetched.advance(llm.kv, seq)
        except WrongRowsError as error:
            raise EntryError("wrong", str(error)) from error
        except (ValueError, LookupError) as error:
            raise EntryError("refused", str(error)) from error

    def missed(self, error: EntryError) -> Restored:
        self._tally.miss(error.reason)
        return Restored(n_tokens=0, exact=True, tier="none", seconds=0, reason=str(error))
