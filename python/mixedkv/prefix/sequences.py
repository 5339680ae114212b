"""Keeps which rows the context holds, for whom, and who may share them.

A sequence that ends its work stays as an idle prefix until its place or its rows are needed. A new prompt
starts from the longest prefix that a sequence of the same tenant has, idle or running: `seq_cp` shares the
rows, llama.cpp counts the references. What belongs to a moment (F16 copies, sliding windows, recurrent state)
comes from a checkpoint of that sequence. Nothing is shared between tenants.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from mixedkv.config.cut_rule import CutRule
from mixedkv.errors import UnsupportedModelError
from mixedkv.kv.checkpoint import Checkpoint, served
from mixedkv.kv.rows import Validities
from mixedkv.log_once import LogOnce
from mixedkv.prefix.checkpoints import CheckpointLimits, thinned
from mixedkv.prompts.overflow import DroppedTokens, LongPrompt
from mixedkv.tokens import Tokens, common_prefix


@dataclass(eq=False, slots=True)
class Sequence:
    """One sequence of the context. `tokens` are those that have rows, in order of position.

    Attributes:
        keep: a prefix that was asked for; it is copied, never continued, and evicted after others.
        paused: rows of an answer that goes on later: not continued by others, and evicted last of all.
        checkpoints: what it held besides rows when it was shorter, in order of length.
        whole: it still holds what the token at its end reads.
        assembled: some of its rows were computed elsewhere: only who accepts that goes on from them.
        reuse_options: what the request asked of rows that were computed elsewhere; None for nothing.
        dropped_tokens: what of a longer prompt was left out; where it is `assembled` too, later rows were
            shifted left, and nobody but the next turn goes on from them.
        shared: other sequences may have its rows at the positions below.
        session: whose prefix it then is, if it is a session's.
        n_prompt: how many of its tokens were the prompt that was answered last; 0 where none was.
        windowless: layers with a sliding window have let go of it; a checkpoint brings it back.
        version: changes whenever rows are taken away, so that who reads rows later can tell.
    """

    id: int
    tenant: str = ""
    tokens: array[int] = field(default_factory=lambda: array("i"))
    running: bool = False
    keep: bool = False
    paused: bool = False
    checkpoints: list[Checkpoint] = field(default_factory=list)
    whole: bool = True
    assembled: bool = False
    reuse_options: object | None = None
    dropped_tokens: DroppedTokens | None = None
    shared: int = 0
    session: str | None = None
    n_prompt: int = 0
    windowless: bool = False
    used_at: int = 0
    version: int = 0

    @property
    def saved(self) -> bool:
        """There is a checkpoint of it as it is."""
        return any(point.n == len(self.tokens) for point in self.checkpoints)

    def common(self, prompt: Tokens) -> int:
        """Return the number of first tokens that are the same."""
        return common_prefix(np.frombuffer(self.tokens, np.int32), prompt) if self.tokens else 0


log = logging.getLogger("mixedkv.engine")

Reuse = Literal["exact", "prefix", "chunks"]

MIN_SHARED = 16  # fewest tokens that are worth a copy
_MAX_CUT = 32  # most tokens that an idle sequence may lose when it is taken over instead of copied


@dataclass(frozen=True, slots=True)
class SequenceMatch:
    """The best start for a prompt: `n` tokens of `source`, with a checkpoint where a plain cut would not do;
    up to `longest` are the same, but cannot be gone on from exactly. `dropped` tokens of the source from
    `head` on are taken out first. `again`: the source answered the same prompt, and what it answered is about
    to be answered again.
    """

    source: Sequence | None
    n: int
    exact: bool
    longest: int
    checkpoint: Checkpoint | None = None
    head: int = 0
    dropped: int = 0
    again: bool = False

    @property
    def moved(self) -> bool:
        """Its rows are, or will be, at other positions than those they were evaluated at."""
        return self.dropped > 0 or (self.source is not None and self.source.assembled)


NO_MATCH = SequenceMatch(None, 0, True, 0)


class SequenceMemory(Protocol):
    """The part of a `KVCache` that the sequence pool needs."""

    @property
    def used(self) -> int: ...

    @property
    def can_shift(self) -> bool: ...

    def remove(self, seq: int = 0, p0: int = 0, p1: int = -1) -> None: ...

    def remove_and_shift(
        self, seq: int, begin: int, end: int, *, shared: npt.ArrayLike | None = None
    ) -> None: ...

    def copy(self, source: int, target: int, p0: int = 0, p1: int = -1) -> None: ...

    def checkpoint(self, seq: int) -> Checkpoint | None: ...

    def resume(self, point: Checkpoint, n: int, source: int, target: int) -> None: ...

    def holds(self, seq: int, n: int) -> bool: ...

    def has_rows(self, seq: int, n: int) -> bool: ...

    def validity(self, seq: int, tokens: npt.ArrayLike, p0: int = 0) -> Validities: ...

    def release_hot_rows(self, seq: int) -> None: ...

    def hold_hot_rows(self, seq: int) -> None: ...

    def drop_window(self, seq: int) -> None: ...


class SequencePool:
    """All sequences of a context. Belongs to the engine's thread.

    Args:
        rule: where the context's sequences can be cut.
        exact_only: use no prefix whose F16 window is incomplete.
        max_kept: maximum number of kept prefixes, which are evicted last; None is half of all sequences.
            Tenants that ask for them share this number.
        limits: limits on checkpoints.
        most_kept: returns how many prefixes a tenant may keep at most; None for its equal share.
        min_shared: fewest tokens that are worth a start.
        n_windows: sequences that layers with a sliding window have room for, 0: all. So many run at most.
    """

    def __init__(
        self,
        memory: SequenceMemory,
        n_seq: int,
        rule: CutRule,
        *,
        exact_only: bool = True,
        max_kept: int | None = None,
        limits: CheckpointLimits | None = None,
        most_kept: Callable[[str], int | None] = lambda tenant: None,
        min_shared: int = MIN_SHARED,
        n_windows: int = 0,
    ) -> None:
        self._n_windows = n_windows if rule.sliding else 0
        self._memory, self.rule, self.exact_only = memory, rule, exact_only
        self.limits, self._most_kept = limits or CheckpointLimits(), most_kept
        self._min_shared = min_shared
        self._all = [Sequence(i) for i in range(n_seq)]
        self._max_kept = max(1, n_seq // 2) if max_kept is None else max_kept
        self._clock = 0
        self.n_evicted = 0
        self._once = LogOnce(log)

    def held(self) -> list[Sequence]:
        """Return the sequences that have rows or are about to."""
        return [seq for seq in self._all if seq.running or seq.tokens]

    def idle(self) -> list[Sequence]:
        """Return the idle prefixes, in the order of their eviction."""
        idle = [seq for seq in self._all if seq.tokens and not seq.running]
        kept = self._kept(idle)
        return sorted(idle, key=lambda seq: (seq.paused, seq.id in kept, seq.used_at))

    def _kept(self, idle: list[Sequence]) -> set[int]:
        """Return the sequences to be evicted last: each tenant's latest with `keep`, up to its share and
        limit.
        """
        by_tenant: dict[str, list[Sequence]] = {}
        for seq in sorted(idle, key=lambda seq: -seq.used_at):
            if seq.keep:
                by_tenant.setdefault(seq.tenant, []).append(seq)
        share = self._max_kept // max(1, len(by_tenant))
        kept: set[int] = set()
        for tenant, seqs in by_tenant.items():
            most = self._most_kept(tenant)
            kept.update(seq.id for seq in seqs[: share if most is None else min(share, most)])
        return kept

    @property
    def stamp(self) -> tuple[object, ...]:
        """Return a value that changes whenever the result of `match` may change."""
        return tuple(
            (
                seq.version,
                len(seq.tokens),
                len(seq.checkpoints),
                seq.running,
                seq.whole,
                seq.reuse_options,
            )
            for seq in self._all
        )

    def match(
        self, tenant: str, prompt: Tokens, accept: Reuse | None = None, reuse_options: object | None = None
    ) -> SequenceMatch:
        """Find the longest usable cached prefix of a prompt, at most all but its last token.

        Args:
            accept: which rows may be reused; None is the pool's default.
            reuse_options: how rows that were computed elsewhere must have been asked for; None takes all.
        """
        exact_only = self.is_exact_only(accept)
        best = NO_MATCH
        for seq in self._all:
            if (
                seq.tenant == tenant
                and seq.tokens
                and (
                    not seq.assembled
                    or (_is_chunks(seq, accept) and reuse_options in (None, seq.reuse_options))
                )
            ):
                n = min(seq.common(prompt), len(prompt) - 1)
                if n >= self._min_shared or (seq.keep and 0 < n == len(seq.tokens)):
                    best = _better(best, self._match(seq, n, exact_only and not seq.assembled))
        return best

    def match_long(self, tenant: str, prompt: LongPrompt) -> tuple[SequenceMatch, int]:
        """Find the sequence with the longest start for a prompt that does not fit the context, of which the
        tokens behind its head are dropped. The sequence may have dropped some of them in an earlier turn.

        Returns:
            the match, whose `dropped` tokens are still to be taken out of the sequence, and how many tokens
            of the prompt are left out in all.
        """
        best, n_dropped = NO_MATCH, 0
        for seq in self._all:
            if seq.tenant != tenant or not seq.tokens or (seq.assembled and not self._goes_on(seq)):
                continue
            part = seq.dropped_tokens
            gone = part.n if part is not None else 0
            if part is not None and part.begin != prompt.head:
                continue
            beginning, dropped = prompt.beginning(len(seq.tokens) + 1, gone), prompt.to_drop(gone)
            more = dropped - gone  # still to be taken out of the sequence
            n = min(seq.common(beginning), len(beginning) - 1) - more
            if n <= max(best.n, prompt.head + self._min_shared) or (more and not self.can_move):
                continue
            if not self._has_rows(seq, n + more):
                continue
            if part is None or part.is_of(prompt.tokens):  # checked last, since it hashes all dropped tokens
                exact = not more and self.is_exact(seq)
                best, n_dropped = SequenceMatch(seq, n, exact, n, head=prompt.head, dropped=more), dropped
        return best, n_dropped

    @property
    def can_move(self) -> bool:
        """True if rows can go to other positions."""
        return self._memory.can_shift

    def n_cells(self, match: SequenceMatch) -> int:
        """Return the number of cells that are needed, or become free, when the rows of a match are moved."""
        source = match.source
        if source is None or not match.dropped:
            return 0
        if source.shared > match.head + match.dropped or not self._may_take(source, match):
            return match.n - match.head  # copies
        return 0 if source.shared > match.head else -match.dropped

    def is_exact_only(self, accept: Reuse | None) -> bool:
        return self.exact_only if accept is None else accept != "prefix"

    def _match(self, seq: Sequence, n: int, exact_only: bool) -> SequenceMatch:
        """Return a match with the first n tokens of a sequence, or as many of them as can be used."""
        goes_on = seq.whole and self.rule.cut_is_exact(len(seq.tokens), n)
        exact = goes_on and self.is_exact(seq, end=n)
        if exact or (goes_on and not exact_only and self._has_rows(seq, n)):
            return SequenceMatch(seq, n, exact, n)
        if not exact_only and self.rule.only_approximate and not seq.assembled and self._has_rows(seq, n):
            return SequenceMatch(seq, n, False, n)
        at, point = served(seq.checkpoints, n)
        exact = point is not None and self.is_exact(seq, end=at)
        if point is None or at < self._min_shared or (exact_only and not exact):
            return replace(NO_MATCH, longest=n)
        return SequenceMatch(seq, at, exact, n, point)

    def is_exact(self, seq: Sequence, begin: int = 0, end: int | None = None) -> bool:
        """Return whether a sequence's rows of tokens [begin, end) are those that evaluating from the start
        gives.
        """
        return not self._memory.validity(seq.id, seq.tokens[begin:end], begin).any()

    def continues_exactly(self, seq: Sequence, n: int) -> bool:
        """Return whether the token behind the first `n` of a sequence finds all that it reads, and exact."""
        return self._memory.holds(seq.id, n) and self.is_exact(seq, end=n)

    def confirm(self, match: SequenceMatch) -> bool:
        """Return whether the source still holds what the match needs, which may have been needed elsewhere;
        if not, it does not match like this again.
        """
        source = match.source
        if source is None or match.checkpoint:
            return True
        if not match.exact:
            if not (has_rows := self._has_rows(source, match.n)):
                source.version += 1  # another search asks again
            return has_rows
        source.whole = self._memory.holds(source.id, match.n)
        return source.whole

    def _has_rows(self, seq: Sequence, n: int) -> bool:
        """Return whether a sequence can be cut at `n` tokens. Layers with a sliding window are asked."""
        return not self.rule.slides or self._memory.has_rows(seq.id, n)

    def acquire(self, tenant: str, match: SequenceMatch) -> Sequence | None:
        """Return a running sequence that starts with the match's rows; None when all are running."""
        source = match.source
        self._free_windows(1, source if match.checkpoint is None else None)
        if source is None:
            seq = self._free(None)
        elif not match.dropped and (match.again or self._may_continue(source, match.n)):
            seq = self._cut(source, match)
        elif match.dropped or (source.assembled and source.dropped_tokens is not None):
            seq = self._move(source, match)
        else:
            seq = self._copy(source, match)
        if seq is None:
            return None
        seq.tenant, seq.running, seq.session = tenant, True, None
        seq.keep = seq.paused = False
        seq.whole, seq.windowless = True, False
        seq.assembled = source is not None and (source.assembled or match.dropped > 0)
        seq.reuse_options = source.reuse_options if source is not None and seq.assembled else None
        seq.dropped_tokens, seq.n_prompt = None, 0
        if source is not None:  # a prefix that is shared counts as used, however old it is
            self.touch(source)
            self._memory.hold_hot_rows(seq.id)  # its window is whole now, and others may be evaluated first
        self._free_windows(0, None)
        self.touch(seq)
        return seq

    def save(self, seq: Sequence) -> None:
        """Take a checkpoint of a sequence: its state besides the rows. F16 rows of an idle sequence then
        count as free, since the checkpoint has them. So do those of one that is not exact, which gets none.
        """
        if not self.limits.per_sequence or self.rule.anywhere:
            return
        exact = self.is_exact(seq)
        if exact and not seq.saved:
            point = self._memory.checkpoint(seq.id)
            if point is None:
                return
            seq.checkpoints = thinned([*seq.checkpoints, point], self.limits.per_sequence)
            self._make_room(seq)
        if not seq.running and (seq.saved or not exact):
            self._memory.release_hot_rows(seq.id)

    def _free_windows(self, n_more: int, spare: Sequence | None) -> None:
        """Have layers with a sliding window let go of idle sequences but `spare`, until they have room for
        `n_more`: the ones first that a checkpoint brings back, then the ones used the longest ago.
        """
        if not self._n_windows:
            return
        holders = [seq for seq in self._all if (seq.running or seq.tokens) and not seq.windowless]
        idle = [seq for seq in holders if not seq.running and seq is not spare]
        idle.sort(key=lambda seq: (seq.paused, not seq.saved, seq.used_at))
        for seq in idle[: max(0, len(holders) + n_more - self._n_windows)]:
            self._memory.drop_window(seq.id)
            seq.windowless, seq.whole = True, False
            seq.version += 1

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints of all sequences; one that several share is listed once."""
        return list({id(point): point for seq in self._all for point in seq.checkpoints}.values())

    def _make_room(self, spare: Sequence) -> None:
        """Drop checkpoints until they fit their limit, from the sequence used the longest ago."""
        order = sorted(self._all, key=lambda seq: (seq is spare, seq.running, seq.used_at))
        while sum(point.nbytes for point in self.checkpoints) > int(self.limits.max_bytes):
            seq = next(seq for seq in order if seq.checkpoints)
            seq.checkpoints = thinned(seq.checkpoints, len(seq.checkpoints) - 1)

    def release(self, seq: Sequence, keep: bool = False, session: str | None = None) -> None:
        """Release a sequence whose work is done: its rows stay as an idle prefix."""
        seq.running, seq.keep, seq.session = False, keep, session if keep else None
        self.touch(seq)

    def pause(self, seq: Sequence) -> None:
        """Pause a sequence whose work goes on later: its rows wait."""
        seq.running, seq.paused = False, True
        self.touch(seq)

    def own_rows(self, seq: Sequence, tenant: str, tokens: Tokens, most_cut: int = 0) -> SequenceMatch:
        """Return where a paused job with these tokens goes on, if its rows still wait for it. Up to
        `most_cut` of the last ones that are not of these tokens are taken away.
        """
        return self.go_back(seq, tenant, min(seq.common(tokens), len(tokens) - 1), most_cut)

    def go_back(self, seq: Sequence, tenant: str, n: int, most_cut: int) -> SequenceMatch:
        """Cut rows that wait for a tenant's next job to the first `n` tokens; no match where they do not wait
        for it, or more than `most_cut` tokens would go.
        """
        if not seq.paused or seq.tenant != tenant or n == 0 or len(seq.tokens) - n > most_cut:
            return NO_MATCH
        if not self._has_rows(seq, n):
            return NO_MATCH
        match = SequenceMatch(seq, n, self.continues_exactly(seq, n), 0)
        return match if n == len(seq.tokens) or self._cut(seq, match) is not None else NO_MATCH

    def forget(self, tenant: str, session: str) -> None:
        """Drop the prefix of a session."""
        for seq in self.idle():
            if (seq.tenant, seq.session) == (tenant, session):
                self.drop(seq)

    def forget_tokens(self, tenant: str, tokens: Tokens, begin: int) -> None:
        """Drop idle sequences of a tenant that begin like `tokens` to behind position `begin`."""
        for seq in self.idle():
            if seq.tenant == tenant and not seq.running and seq.common(tokens) > begin:
                self.drop(seq)

    def drop(self, seq: Sequence) -> None:
        """Free a sequence's rows and its place."""
        self.clear(seq)
        seq.running = seq.keep = seq.paused = False
        seq.session, seq.assembled, seq.dropped_tokens = None, False, None

    def clear(self, seq: Sequence) -> None:
        """Remove the rows of a sequence."""
        self._memory.remove(seq.id)
        seq.tokens, seq.checkpoints, seq.whole = array("i"), [], True
        seq.shared, seq.windowless = 0, False
        seq.version += 1

    def n_copied(self, seq: Sequence, end: int) -> int:
        """Return how many rows from `end` on must be copied before they move, since others may share them."""
        return len(seq.tokens) - end if seq.shared > end else 0

    def remove_and_shift(self, seq: Sequence, begin: int, end: int) -> bool:
        """Drop tokens [begin, end) of a sequence, and move down the rows behind them; False when these are
        lost, since the memory cannot move them or has no room for copies of those that are shared.
        """
        rest = seq.tokens[end:] if self.n_copied(seq, end) else None
        try:
            self._memory.remove_and_shift(seq.id, begin, end, shared=rest)
            if not self._has_rows(seq, len(seq.tokens) - (end - begin)):
                raise ValueError("layers with a sliding window have let go of rows that come near")
        except (ValueError, UnsupportedModelError) as error:
            log.warning("rows cannot be moved, so they are evaluated again: %s", error)
            self.clear(seq)
            seq.assembled = False
            return False
        del seq.tokens[begin:end]
        seq.checkpoints = [point for point in seq.checkpoints if point.n <= begin]
        seq.assembled, seq.shared = True, min(seq.shared, begin)
        seq.version += 1
        return True

    def repeats_its_prompt(self, match: SequenceMatch, n_prompt: int) -> bool:
        """Return whether the idle source of a match answered this prompt, and can do so again in its
        place.
        """
        source = match.source
        if source is None or source.running or source.keep or source.paused or match.dropped:
            return False
        return source.n_prompt == n_prompt == match.n + 1

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
        """Number of cells that hold rows."""
        return self._memory.used

    def touch(self, seq: Sequence) -> None:
        self._clock += 1
        seq.used_at = self._clock

    def _may_continue(self, source: Sequence, n: int) -> bool:
        n_cut = len(source.tokens) - n
        return not (source.running or source.keep) and n_cut <= (0 if source.paused else _MAX_CUT)

    def _goes_on(self, seq: Sequence) -> bool:
        """Return whether the next turn may take moved rows: they are never shared."""
        return seq.dropped_tokens is not None and not (seq.running or seq.keep or seq.paused)

    def _may_take(self, source: Sequence, match: SequenceMatch) -> bool:
        return source.assembled or self._may_continue(source, match.n + match.dropped)

    def _move(self, source: Sequence, match: SequenceMatch) -> Sequence | None:
        plain = replace(match, n=match.n + match.dropped, dropped=0)
        seq = self._cut(source, plain) if self._may_take(source, match) else self._copy(source, plain)
        if (
            seq is None
            or not match.dropped
            or self.remove_and_shift(seq, match.head, match.head + match.dropped)
        ):
            return seq
        self.drop(seq)
        return None

    def _cut(self, seq: Sequence, match: SequenceMatch) -> Sequence | None:
        if not self._take_rows(seq, seq, match):
            return None
        if match.n < len(seq.tokens):
            del seq.tokens[match.n :]
            seq.shared = min(seq.shared, match.n)
            seq.checkpoints = [point for point in seq.checkpoints if point.n <= match.n]
            seq.version += 1
        return seq

    def _copy(self, source: Sequence, match: SequenceMatch) -> Sequence | None:
        target = self._free(source)
        if target is None:  # all others are running, so the source itself is used
            return None if source.running else self._cut(source, match)
        if not self._take_rows(source, target, match):
            return None
        target.tokens = source.tokens[: match.n]
        target.shared, source.shared = match.n, max(source.shared, match.n)
        target.checkpoints = [point for point in source.checkpoints if point.n <= match.n]
        return target

    def _take_rows(self, source: Sequence, target: Sequence, match: SequenceMatch) -> bool:
        """Give the target its rows. Return False if the checkpoint is unusable; it is then dropped."""
        n, point = match.n, match.checkpoint
        if point is not None:
            try:
                self._memory.resume(point, n, source.id, target.id)
            except ValueError as error:
                # once: in a small context each prompt may meet this
                self._once.warning("a checkpoint cannot be used: %s", error, key="checkpoint")
                source.checkpoints = [other for other in source.checkpoints if other is not point]
                if source is target:
                    self.drop(source)
                return False
        elif source is not target:
            self._memory.copy(source.id, target.id, p1=n)
        elif n < len(source.tokens):
            self._memory.remove(source.id, n)
        return True

    def _free(self, spare: Sequence | None) -> Sequence | None:
        """Return a sequence without rows, made by eviction if need be."""
        for _ in range(2):
            for seq in self._all:
                if not seq.running and not seq.tokens:
                    return seq
            if not self.evict(spare):
                return None
        return None


def is_better(n: int, exact: bool, match: SequenceMatch, least: int = 0) -> bool:
    """Return whether `n` stored tokens are a better start than those that the context has: at least `least`
    more, since they are loaded; without that as many too, if those of the context are not exact.
    """
    if least:
        return n >= match.n + least
    return (n, exact) > (match.n, match.exact)


def _is_chunks(seq: Sequence, accept: Reuse | None) -> bool:
    """Return whether an assembled sequence may be used."""
    return accept == "chunks" and seq.dropped_tokens is None


def _better(a: SequenceMatch, b: SequenceMatch) -> SequenceMatch:
    """Return the better match: the longer one, then the exact one, then that of an idle sequence."""

    def rank(match: SequenceMatch) -> tuple[int, bool, bool]:
        return match.n, match.exact, match.source is not None and not match.source.running

    best = b if b.n and rank(b) > rank(a) else a
    return replace(best, longest=max(a.longest, b.longest))
