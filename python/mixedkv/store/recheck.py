"""Decides which stored entries are believed: those that this process stored, and those of which it evaluated
some tokens again with the same rows as a result.

An entry with a correct checksum can still be wrong, if the program that computed it was.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from mixedkv.kv.evaluate_again import Again, Span
from mixedkv.kv.row_source import RowSource
from mixedkv.store.entries import Entries
from mixedkv.store.results import Link, Match, Tally
from mixedkv.tokens import Tokens

_LOG = logging.getLogger("mixedkv.store")
_SPAN = 4  # tokens of an entry to evaluate again
_MOST = 32  # tokens of a match to evaluate again, at least one for each entry


@dataclass(frozen=True, slots=True)
class UnverifiedRows:
    """The tokens of a match that are evaluated before it is believed.

    Args:
        match: the match, whose rows are in a sequence.
        spans: positions to evaluate again, ascending.
        links: the entries that these belong to.
    """

    recheck: Recheck
    match: Match
    spans: list[Span] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)

    @property
    def tokens(self) -> Tokens:
        """All tokens of the match."""
        return self.match.tokens

    def verify(self, again: Again) -> str:
        """Verify the rows as `Recheck.verify` does."""
        return self.recheck.verify(self, again)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return sum(end - begin for begin, end in self.spans)


class Recheck:
    """Decides which stored tokens to evaluate again before their rows are believed. Thread-safe.

    Args:
        entries: entries of the store.
        tally: counts the results.
        on: unverified entries of other processes.
    """

    def __init__(self, entries: Entries, tally: Tally, on: bool) -> None:
        self._entries, self._tally, self._on = entries, tally, on
        self._believed: set[str] = set()

    def believe(self, entries: Iterable[str]) -> None:
        self._believed.update(entries)

    def unverified(self, match: Match, llm: RowSource) -> UnverifiedRows:
        """Return the tokens to evaluate again before a match is believed; empty if it is believed."""
        links = [link for link in match.links if link.entry not in self._believed] if self._on else []
        return self._spans(match, links, llm)

    def verify(self, unverified: UnverifiedRows, again: Again) -> str:
        """Believe a match whose rows are right; remove wrong entries and say what is wrong with them."""
        problems = again.problems(unverified.spans)
        wrong = [(link, what) for link, what in zip(unverified.links, problems, strict=True) if what]
        self._tally.add(n_rechecked=len(problems), n_wrong=len(wrong))
        if not wrong:
            self.believe(link.entry for link in unverified.match.links)
            return ""
        for link, what in wrong:
            identity = unverified.match.identity
            _LOG.error(
                "stored entry %s is wrong and was removed: evaluated again, %s; it is of %s, identity %s",
                link.entry,
                what,
                identity.label,
                identity.digest.hex(),
            )
            with suppress(OSError):
                self._entries.remove(link.entry)
        return wrong[0][1]

    def _spans(self, match: Match, links: Sequence[Link], llm: RowSource) -> UnverifiedRows:
        """Choose some tokens of each entry: of the last one its end, where the F16 window is whole."""
        rule, n = llm.kv.cut_rule, match.n_tokens
        if rule.recurrent:  # a recurrent state cannot be cut
            return UnverifiedRows(self, match)
        size = max(1, min(_SPAN, _MOST // max(1, len(links))))
        unverified = UnverifiedRows(self, match)
        for link in links:
            begin = max(link.p0, link.end - size)
            if link.end < n:
                begin = random.randint(link.p0, begin)
            span = begin, min(begin + size, link.end)
            if rule.sliding and link.end < n:  # sliding windows have dropped its rows
                continue
            if len(unverified) + size <= llm.n_batch and (match.tokens[slice(*span)] >= 0).all():  # no image
                unverified.spans.append(span)
                unverified.links.append(link)
        return unverified
