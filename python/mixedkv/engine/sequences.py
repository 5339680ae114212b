"""Which rows the context holds, for whom, and who may share them.

A sequence that ends its work stays as an idle prefix until its place or its rows are needed. A new prompt
starts from the longest prefix that a sequence of the same tenant has, idle or running: `seq_cp` shares the
rows, llama.cpp counts the references. Nothing is shared between tenants.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from mixedkv.hot_window import HotWindow
from mixedkv.tokens import Tokens, common_prefix

MIN_SHARED = 16  # tokens; less is not worth a copy
_MAX_CUT = 32  # tokens an idle sequence loses at most when it is taken over instead of copied


class Memory(Protocol):
    """What of a `KVCache` the pool needs."""

    @property
    def used(self) -> int: ...

    @property
    def can_cut(self) -> bool: ...

    def remove(self, seq: int, p0: int = 0) -> None: ...

    def copy(self, source: int, target: int, p0: int = 0, p1: int = -1) -> None: ...


@dataclass(eq=False, slots=True)
class Sequence:
    """One sequence of the context. `tokens` are those that have rows, in order of position.

    Attributes:
        exact: its rows are what evaluating the tokens from the start gives.
        keep: a prefix that was asked for; it is copied, never continued, and evicted after others.
        paused: rows of an answer that goes on later: not continued by others, and evicted last of all.
        shared: a prefix that several prompts have in common; copied, continued only for want of a place.
        session: whose prefix it then is, if it is a session's.
        version: changes whenever rows are taken away, so that who reads rows later can tell.
    """

    id: int
    tenant: str = ""
    tokens: array[int] = field(default_factory=lambda: array("i"))
    running: bool = False
    exact: bool = True
    keep: bool = False
    paused: bool = False
    shared: bool = False
    session: str | None = None
    used_at: int = 0
    version: int = 0

    def common(self, prompt: Tokens) -> int:
        """Number of first tokens that are the same."""
        return common_prefix(np.frombuffer(self.tokens, np.int32), prompt) if self.tokens else 0


@dataclass(frozen=True, slots=True)
class Match:
    """The best start for a prompt: `n` tokens of `source`; `approximate` more would not be exact."""

    source: Sequence | None
    n: int
    exact: bool
    approximate: int


NO_MATCH = Match(None, 0, True, 0)


class SequencePool:
    """All sequences of a context. Belongs to the engine's thread.

    Args:
        exact_only: take no prefix whose F16 window has aged out.
        max_kept: prefixes that are evicted last because that was asked for; None is half of all. Tenants that
            ask share them.
    """

    def __init__(
        self,
        memory: Memory,
        n_seq: int,
        window: HotWindow,
        *,
        exact_only: bool = True,
        max_kept: int | None = None,
    ) -> None:
        self._memory, self.window, self.exact_only = memory, window, exact_only
        self._all = [Sequence(i) for i in range(n_seq)]
        self._max_kept = max(1, n_seq // 2) if max_kept is None else max_kept
        self._clock = 0
        self.n_evicted = 0

    def held(self) -> list[Sequence]:
        """Sequences that have rows or are about to."""
        return [seq for seq in self._all if seq.running or seq.tokens]

    def idle(self) -> list[Sequence]:
        """Idle prefixes, in the order of their eviction."""
        idle = [seq for seq in self._all if seq.tokens and not seq.running]
        kept = self._kept(idle)
        return sorted(idle, key=lambda seq: (seq.paused, seq.id in kept, seq.used_at))

    def _kept(self, idle: list[Sequence]) -> set[int]:
        """Of those with `keep` each tenant's latest, as many as is its share."""
        by_tenant: dict[str, list[Sequence]] = {}
        for seq in sorted(idle, key=lambda seq: -seq.used_at):
            if seq.keep:
                by_tenant.setdefault(seq.tenant, []).append(seq)
        share = self._max_kept // max(1, len(by_tenant))
        return {seq.id for seqs in by_tenant.values() for seq in seqs[:share]}

    def match(self, tenant: str, prompt: Tokens) -> Match:
        """The longest usable prefix of a prompt, one token short of the whole at most."""
        best, n_best, exact_best, approximate = None, 0, True, 0
        for seq in self._all:
            if seq.tenant != tenant or not seq.tokens:
                continue
            n = min(seq.common(prompt), len(prompt) - 1)
            if n < MIN_SHARED or (not self._memory.can_cut and n != len(seq.tokens)):
                continue
            exact = seq.exact and self.window.cut_is_exact(len(seq.tokens), n)
            if self.exact_only and not exact:
                approximate = max(approximate, n)
            elif (n, exact, not seq.running) > (n_best, exact_best, best is not None and not best.running):
                best, n_best, exact_best = seq, n, exact
        return Match(best, n_best, exact_best, approximate)

    def acquire(self, tenant: str, match: Match) -> Sequence | None:
        """A running sequence that starts with the match's rows; None when all are running."""
        source = match.source
        if source is None:
            seq = self._free(None)
        elif self._may_continue(source, match.n):
            seq = self._cut(source, match.n)
        else:
            seq = self._copy(source, match.n)
        if seq is None:
            return None
        seq.tenant, seq.running, seq.session = tenant, True, None
        seq.keep = seq.paused = seq.shared = False
        seq.exact = match.exact
        if source is not None:  # a prefix that many share is in use, however old it is
            self.touch(source)
        self.touch(seq)
        return seq

    def snapshot(self, source: Sequence) -> None:
        """Keep a copy of a running sequence as it is now, if a place is free or idle."""
        target = self._free(source)
        if target is not None:
            self._share(source, target, len(source.tokens))
            target.tenant, target.exact, target.shared = source.tenant, source.exact, True
            self.touch(target)

    def release(self, seq: Sequence, keep: bool = False, session: str | None = None) -> None:
        """The work is done: the rows stay as an idle prefix."""
        seq.running, seq.keep, seq.session = False, keep, session if keep else None
        self.touch(seq)

    def pause(self, seq: Sequence) -> None:
        """The work goes on later: the rows wait for it."""
        seq.running, seq.paused = False, True
        self.touch(seq)

    def own_rows(self, seq: Sequence, tenant: str, tokens: Tokens) -> Match:
        """Where a paused job with these tokens goes on, if its rows still wait for it."""
        n = len(seq.tokens)
        if seq.paused and seq.tenant == tenant and n < len(tokens) and seq.common(tokens) == n:
            return Match(seq, n, seq.exact, 0)
        return NO_MATCH

    def forget(self, tenant: str, session: str) -> None:
        """Drop the prefix of a session."""
        for seq in self.idle():
            if (seq.tenant, seq.session) == (tenant, session):
                self.drop(seq)

    def drop(self, seq: Sequence) -> None:
        """Give the rows and the place back."""
        self.clear(seq)
        seq.running = seq.keep = seq.paused = seq.shared = False
        seq.exact, seq.session = True, None

    def clear(self, seq: Sequence) -> None:
        """Take the rows of a running sequence."""
        self._memory.remove(seq.id)
        seq.tokens = array("i")
        seq.version += 1

    def evict(self, spare: Sequence | None = None) -> bool:
        """Drop the idle prefix that was used the longest ago; False when there is none."""
        for seq in self.idle():
            if seq is not spare:
                self.drop(seq)
                self.n_evicted += 1
                return True
        return False

    @property
    def used(self) -> int:
        """Cells that hold rows."""
        return self._memory.used

    def touch(self, seq: Sequence) -> None:
        self._clock += 1
        seq.used_at = self._clock

    def _may_continue(self, source: Sequence, n: int) -> bool:
        n_cut = len(source.tokens) - n
        return not (source.running or source.keep or source.shared) and n_cut <= (
            0 if source.paused else _MAX_CUT
        )

    def _cut(self, seq: Sequence, n: int) -> Sequence:
        if n < len(seq.tokens):
            self._memory.remove(seq.id, n)
            del seq.tokens[n:]
            seq.version += 1
        return seq

    def _copy(self, source: Sequence, n: int) -> Sequence | None:
        target = self._free(source)
        if target is None:  # every other one runs: the source itself has to serve
            return None if source.running else self._cut(source, n)
        return self._share(source, target, n)

    def _share(self, source: Sequence, target: Sequence, n: int) -> Sequence:
        self._memory.copy(source.id, target.id, p1=n)
        target.tokens = source.tokens[:n]
        return target

    def _free(self, spare: Sequence | None) -> Sequence | None:
        """A sequence without rows, made by eviction if need be."""
        for _ in range(2):
            for seq in self._all:
                if not seq.running and not seq.tokens:
                    return seq
            if not self.evict(spare):
                return None
        return None
