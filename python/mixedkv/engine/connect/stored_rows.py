"""Copies rows between an engine's context and a `KVStore`, a bounded part between two steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from mixedkv.engine.connect.kv_connector import ConnectedEngine
from mixedkv.kv.block import KVBlock
from mixedkv.limits import CELLS
from mixedkv.start.sequence import Sequence
from mixedkv.store import Identity, KVStore
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

    def put(self, store: KVStore, identity: Identity, rows: SequenceRows, session: str | None = None) -> int:
        """Store what is not stored yet. Return how many of the tokens are in the store now."""
        saved = store.keep(
            identity, rows.tokens, partial(self._export, rows), session=session, most=self._slice
        )
        if saved.n_stored:
            self._engine.observer.stored(saved.n_stored)
        return saved.n_tokens

    def cut(self, blocks: list[KVBlock]) -> list[KVBlock]:
        """Cut blocks to a size that can be loaded between two steps."""
        return [
            block.slice(p0, min(p0 + self._slice, block.p1))
            for block in blocks
            for p0 in range(block.p0, block.p1, self._slice)
        ]

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
