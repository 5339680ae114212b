"""Sequence 0 of a `Llama` as a pool of one: an engine's rules for callers that evaluate on their own thread.

What a prompt starts from, who may go on from what is live, and what is dropped when the context is full are
the rules of `SequencePool` and `prompts.overflow`. The caller steps: nothing happens between two calls.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from mixedkv.errors import UnsupportedModelError
from mixedkv.llama import Llama
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.prompts.overflow import Gap, LongPrompt, Places, cut, message_starts
from mixedkv.start.checkpoints import CheckpointLimits
from mixedkv.start.sequences import NO_MATCH, SequenceMatch, SequencePool, is_better
from mixedkv.start.sequences import Sequence as Rows
from mixedkv.store import Identity, KVStore
from mixedkv.store.results import Match
from mixedkv.tokens import Tokens, common_prefix

_LOG = logging.getLogger("mixedkv.start")

Source = Literal["live", "ram", "disk", "remote", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixReuse:
    """Counts what was reused for one prompt.

    Args:
        n_tokens: tokens at the beginning of the prompt that were not evaluated.
        source: where these came from; "live" is the cache itself.
        exact: the cache continues like one that evaluated this prompt from its first token. False if a mixed
            cache was cut and lacks recent F16 rows, for all tokens evaluated after such a cut as long as they
            are live, and if tokens in the middle were dropped.
        match: the match of the prompt in the store.
        reason: why stored KV was not used; "" otherwise.
    """

    n_tokens: int = 0
    source: Source = "none"
    exact: bool = True
    match: Match | None = None
    reason: str = ""


@dataclass(eq=False, slots=True)
class _Held:
    """Sequence 0 between its callers. `seq.tenant` is its owner, and `seq.tokens` are what that has left."""

    pool: SequencePool
    seq: Rows
    claim: object | None = None  # of who has not left it yet; no caller, which would keep the `Llama` alive


# By `Llama`, not by caller: the next caller must know whose tokens are in its sequence.
_held: WeakKeyDictionary[Llama, _Held] = WeakKeyDictionary()


class LoneSequence:
    """A caller's right to use sequence 0 of a `Llama`, until another one claims it.

    Tokens that were left for the same owner stay; those of any other owner are dropped.

    Args:
        store: where prefixes are looked for as well.
        identity: of the `Llama` and the tenant.
        asker: which façade it is; with the identity it is the owner.
        untouched: also drop the sequence if tokens were evaluated after it was left.
        sinks: first tokens that stay where the context is full and older ones are dropped; None drops
            nothing.
        before_drop: called before the first tokens are dropped, while the sequence is still whole.
    """

    def __init__(
        self,
        llm: Llama,
        store: KVStore,
        identity: Identity,
        asker: str,
        *,
        untouched: bool,
        sinks: int | None = None,
        before_drop: Callable[[], None] = lambda: None,
    ) -> None:
        self._llm, self._store, self.identity = llm, store, identity
        self.sinks, self._before_drop = sinks, before_drop
        self.size = context_size(llm)
        self._held = held = _held_by(llm)
        self._pool, self._seq = held.pool, held.seq
        owner, is_left = f"{asker} {identity.digest.hex()}", held.claim is None
        if not (is_left and held.seq.tenant == owner and self._is_there(untouched)):
            self._empty()
        held.seq.tenant = owner
        self._claim = held.claim = object()

    @property
    def mine(self) -> bool:
        """True until another caller claims the sequence."""
        return self._held.claim is self._claim

    @property
    def n_dropped(self) -> int:
        """Tokens dropped behind the sinks, so far."""
        return self._seq.gap.n if self._seq.gap is not None else 0

    def leave(self) -> None:
        """Leave the sequence as it is for the next claim of the same owner."""
        if self.mine:
            self._follow()
            self._held.claim = None

    # --- where a prompt starts ---

    def start(self, tokens: Sequence[int] | Tokens, *, exact_live: bool, exact_stored: bool) -> PrefixReuse:
        """Leave the longest prefix of a prompt in the sequence that is live or stored. At least the last
        token is left to be evaluated: sampling needs its logits.

        Args:
            exact_live: use live rows only if the prompt then continues exactly.
            exact_stored: the same for stored rows.
        """
        prompt = np.asarray(tokens, np.int32)
        self._follow(exact_live)
        match, reason = self._match(prompt, "exact" if exact_live else "prefix"), ""
        found = None
        if len(prompt) > 1:
            found = self._store.find(self.identity, prompt[:-1], exact_only=exact_stored)
        if found is not None and is_better(found.n_tokens, found.exact, match):
            restored = self._store.restore(
                self._llm, prompt[:-1], identity=self.identity, exact_only=exact_stored
            )
            if restored.hit:
                self._seq.gap, self._seq.stitched = None, False
                self._follow()
                return PrefixReuse(
                    n_tokens=restored.n_tokens,
                    source=restored.tier,
                    exact=restored.exact,
                    match=found,
                    reason=restored.reason,
                )
            reason = restored.reason
            if not self._llm.n_tokens:  # one that was refused leaves nothing
                match = NO_MATCH
        self._take(match)
        return PrefixReuse(
            n_tokens=match.n,
            source="live" if match.n else "none",
            exact=match.exact,
            match=found,
            reason=reason,
        )

    def prefill(self, tokens: Sequence[int], *, exact_only: bool) -> tuple[PrefixReuse, int]:
        """Evaluate a prompt from where it starts. Of one that does not fit the middle is dropped: what is
        live goes on without it, and where nothing is, what fits is evaluated.

        Returns:
            What was reused, with the tokens dropped from it, and how many were evaluated.

        Raises:
            RuntimeError, ValueError, UnsupportedModelError: as `eval`.
        """
        self._check_mine()
        prompt = np.asarray(tokens, np.int32)
        if len(prompt) < self.size:
            reused = self.start(prompt, exact_live=exact_only, exact_stored=exact_only)
            n = reused.n_tokens
        else:
            reused, prompt = self._start_long(prompt, exact_only)
            n = len(self._seq.tokens)
        self.eval(prompt[n:].tolist())
        return reused, len(prompt) - n

    def _start_long(self, prompt: Tokens, exact_only: bool) -> tuple[PrefixReuse, Tokens]:
        """Start a prompt that does not fit; return it without the tokens that are dropped."""
        long = LongPrompt(prompt, self._check_room(), self.size, self._starts(prompt))
        source: Source = "live"
        match, n_dropped = self._match_long(long)
        if not match.n:  # live or stored it may be there as it was before anything was dropped
            source = self.start(prompt[: self.size], exact_live=exact_only, exact_stored=exact_only).source
            match, n_dropped = self._match_long(long)
        begin = self.n_dropped
        self._take(match)
        if self._seq.tokens:
            reused = PrefixReuse(n_tokens=match.n + n_dropped, source=source, exact=False)
        else:
            begin, n_dropped = 0, long.to_drop()
            reused = self.start(long.without(n_dropped), exact_live=exact_only, exact_stored=exact_only)
            reused = replace(reused, exact=False)
        self._seq.gap, self._seq.stitched = long.gap(n_dropped), True
        if n_dropped > begin:
            self._tell(begin)
        return reused, long.without(n_dropped)

    def _match(self, prompt: Tokens, accept: Literal["exact", "prefix"]) -> SequenceMatch:
        match = NO_MATCH
        while not self._pool.confirm(match := self._pool.match(self._seq.tenant, prompt, accept)):
            pass
        return match

    def _match_long(self, long: LongPrompt) -> tuple[SequenceMatch, int]:
        self._follow()
        return self._pool.match_long(self._seq.tenant, long)

    def _take(self, match: SequenceMatch) -> None:
        """Cut the sequence to a match."""
        if not match.n:
            self._empty()
        else:
            self._pool.acquire(self._seq.tenant, match)
            self._pool.release(self._seq)

    def _empty(self) -> None:
        owner = self._seq.tenant
        self._pool.drop(self._seq)
        self._seq.tenant = owner

    # --- what is live ---

    def _is_there(self, untouched: bool) -> bool:
        left, held = np.frombuffer(self._seq.tokens, np.int32), self._live()
        if untouched and len(left) != len(held):
            return False
        return common_prefix(left, held) == min(len(left), len(held))

    def _follow(self, exact_only: bool = False) -> None:
        """Note what the sequence holds, which others may evaluate into as well; of rows that are not exact,
        `exact_only` drops those behind the first.
        """
        llm, seq = self._llm, self._seq
        if exact_only and (n := llm.kv.exact_tokens) < llm.n_tokens:
            try:
                llm.kv.remove(0, n)
            except UnsupportedModelError:  # a state of the whole sequence cannot be cut
                llm.kv.remove(0)
        live = self._live()
        if common_prefix(np.frombuffer(seq.tokens, np.int32), live) < min(len(seq.tokens), len(live)):
            seq.gap, seq.stitched = None, False  # it was begun anew
        seq.tokens, seq.whole = array("i", live.tobytes()), True

    def _live(self) -> npt.NDArray[np.int32]:
        return np.asarray(self._llm.input_ids[: self._llm.n_tokens], np.int32)

    # --- evaluation ---

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens behind those that are there, dropping older ones as needed.

        Raises:
            RuntimeError: someone else has claimed the sequence.
            ValueError, UnsupportedModelError: the context is full, and nothing can be dropped.
        """
        self._check_mine()
        done = 0
        while done < len(tokens):
            if self._llm.n_tokens == self.size:
                self._make_room()
            part = tokens[done : done + self.size - self._llm.n_tokens]
            self._llm.eval(part)
            done += len(part)

    def _make_room(self) -> None:
        sinks, begin = self._check_room(), self.n_dropped
        if not begin:
            self._before_drop()
        self._follow()
        seq = self._seq
        held = np.array(seq.tokens, np.int32)
        end = cut(self.size, sinks, self.size, self._starts(held))
        gap = (seq.gap or Gap(sinks)).wider(held[sinks:end])
        if not self._pool.close_gap(seq, sinks, end):  # rows are lost: they are evaluated again
            self._llm.eval(np.concatenate([held[:sinks], held[end:]]).tolist())
        seq.gap, seq.stitched = gap, True
        self._tell(begin)

    def _check_mine(self) -> None:
        if not self.mine:
            raise RuntimeError(
                "another answer was begun on this Llama: read a stream to its end or close it before the next"
            )

    def _check_room(self) -> int:
        """Return how many first tokens stay where others are dropped, if that can be done."""
        if self.sinks is None:
            raise ValueError(
                f"the context of {self.size} tokens is full: raise n_ctx, shorten the conversation, or set "
                f"attention_sink_tokens to drop the middle of it"
            )
        self._llm.kv.check_can_shift()
        return self.sinks

    def _tell(self, begin: int) -> None:
        first = (self.sinks or 0) + begin
        _LOG.warning(
            "the context of %d tokens is full: tokens %d to %d of the conversation are dropped",
            self.size,
            first,
            first + self.n_dropped - begin - 1,
        )

    def _starts(self, tokens: Tokens) -> Places:
        return message_starts(_llama_cpp.vocab(self._llm), tokens)


def context_size(llm: Llama) -> int:
    """Return how many tokens sequence 0 can have."""
    n_ctx = llm.kv.stats().n_ctx
    return min(n_ctx, llm.n_ctx_asked or n_ctx)


def _held_by(llm: Llama) -> _Held:
    """Return sequence 0, whose rules are those of its cache as it is now."""
    if llm not in _held:
        pool = SequencePool(llm.kv, 1, llm.kv.cut_rule, limits=CheckpointLimits(per_sequence=0), min_shared=1)
        seq = pool.acquire("", NO_MATCH)
        assert seq is not None
        pool.release(seq)
        _held[llm] = _Held(pool, seq)
    held = _held[llm]
    held.pool.rule = replace(llm.kv.cut_rule, window=llm.kv.config.window)  # the cache is asked what it holds
    return held
