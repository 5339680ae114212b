"""Copies rows between an engine's context and a `KVStore`, a bounded part between two steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mixedkv.engine.connect.kv_connector import ConnectedEngine
from mixedkv.engine.schedule.sequence import Sequence
from mixedkv.kv.block import KVBlock
from mixedkv.limits import CELLS
from mixedkv.store import Identity, KVStore
from mixedkv.store.lookup import worth_building_on
from mixedkv.store.results import Match
from mixedkv.tokens import Tokens

_SLICE_BYTES = 16 << 20  # copied between two steps at a time, which takes some milliseconds


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Rows of a sequence, which are there until its `version` changes."""

    seq: Sequence
    version: int
    tokens: Tokens


class StoredRows:
    """Reads and stores rows, on any thread but the engine's."""

    def __init__(self, engine: ConnectedEngine) -> None:
        self._engine = engine
        stats = engine.llm.kv.stats()
        self._slice = max(CELLS, _SLICE_BYTES * stats.n_ctx // max(1, stats.bytes_total))
        if not engine.pool.rule.only_approximate:  # a slice can only be found where there is a checkpoint
            self._slice = stats.n_ctx
        self._window = engine.llm.kv.config.window.threshold

    def put(self, store: KVStore, identity: Identity, rows: SequenceRows, session: str | None = None) -> int:
        """Store what is not stored yet, in slices of which each builds on the one before. Return how many of
        the tokens are in the store now.
        """
        n = len(rows.tokens)
        parent = self._parent(store, identity, rows.tokens)
        while (p0 := parent.n_tokens if parent is not None else 0) < n:
            p1 = min(n, p0 + self._slice)
            p1 = n if n - p1 < self._window else p1  # the last slice has the whole F16 window
            block = self._export(rows, p0, p1)
            if block is None:
                return p0
            store.put(identity, block, parent, session=session)
            self._engine.observer.stored(p1 - p0)
            if p1 == n:
                return n
            parent = store.find(identity, rows.tokens, max_tokens=p1, remote=False)
            if parent is None or parent.n_tokens != p1:
                return p0  # its parent was removed, or the budget is too small
        return n

    def cut(self, blocks: list[KVBlock]) -> list[KVBlock]:
        """Cut blocks to a size that can be loaded between two steps."""
        return [
            block.slice(p0, min(p0 + self._slice, block.p1))
            for block in blocks
            for p0 in range(block.p0, block.p1, self._slice)
        ]

    def _parent(self, store: KVStore, identity: Identity, tokens: Tokens) -> Match | None:
        """Return the entry that a new one builds on. Within another entry it leaves room for the F16 window,
        whose rows that entry does not have in F16.
        """
        match = store.find(identity, tokens, remote=False)
        if match is not None and match.n_tokens == len(tokens) and match.computed:
            return match
        return worth_building_on(match, max(0, len(tokens) - self._window))

    def _export(self, rows: SequenceRows, p0: int, p1: int) -> KVBlock | None:
        """Export the rows; return None if the sequence has gone or was cut meanwhile, or some of them are not
        those of an evaluation from the start.
        """

        def export() -> KVBlock | None:
            if rows.seq.version != rows.version:
                return None
            kv, seq, n = self._engine.llm.kv, rows.seq, len(rows.tokens)
            block = kv.export(seq.id, p0, p1, rows.tokens[p0:p1])
            if block.n_exact < len(block):
                return None
            whole = kv.holds(seq.id, n)  # its end needs no checkpoint
            points = {point.n: point for point in seq.checkpoints if point.n < n or not whole}
            points |= {point.n: point for point in block.checkpoints}
            return replace(block, checkpoints=tuple(points[n] for n in sorted(points) if p0 < n <= p1))

        return self._engine.call(export).result()
