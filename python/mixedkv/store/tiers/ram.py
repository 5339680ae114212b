"""Keeps blocks in memory, and evicts some when the budget is full."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from threading import Lock

from mixedkv.kv.block import KVBlock
from mixedkv.store.eviction import Eviction, worth_of_use


@dataclass(slots=True)
class _Kept:
    block: KVBlock
    n_bytes: int
    worth: float  # of one use
    uses: int
    priority: float


class RamTier:
    """Blocks by entry id, up to `max_bytes` in all. Thread-safe.

    Args:
        max_bytes: maximum size of all blocks.
        eviction: which block is evicted first, as in `KVStore`.
    """

    def __init__(self, max_bytes: int, eviction: Eviction = "lru") -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        self._eviction = eviction
        self._floor = 0.0  # priority of the last evicted block: later blocks are worth more
        self._blocks: OrderedDict[str, _Kept] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, entry: str) -> bool:
        return entry in self._blocks

    def get(self, entry: str) -> KVBlock | None:
        with self._lock:
            kept = self._blocks.get(entry)
            if kept is None:
                return None
            kept.uses += 1
            kept.priority = self._floor + kept.uses * kept.worth
            if self._eviction == "lru":
                self._blocks.move_to_end(entry)
            return kept.block

    def put(self, entry: str, block: KVBlock) -> None:
        """Keep a block, unless it is larger than the budget."""
        n_bytes = block.nbytes
        if n_bytes > self.max_bytes:
            return
        with self._lock:
            self._drop(entry)
            while self.n_bytes + n_bytes > self.max_bytes:
                self._evict()
            worth = worth_of_use(block.p0, block.p0 + len(block), n_bytes)
            self._blocks[entry] = _Kept(block, n_bytes, worth, uses=1, priority=self._floor + worth)
            self.n_bytes += n_bytes

    def remove(self, entry: str) -> None:
        with self._lock:
            self._drop(entry)

    def keep_only(self, entries: Collection[str]) -> None:
        """Drop all but `entries`: another process may have removed the others from the folder."""
        with self._lock:
            for entry in self._blocks.keys() - set(entries):
                self._drop(entry)

    def _evict(self) -> None:
        first = next(iter(self._blocks))
        if self._eviction == "gdsf":
            first = min(self._blocks, key=lambda entry: self._blocks[entry].priority)
        self._floor = max(self._floor, self._blocks[first].priority)
        self._drop(first)

    def _drop(self, entry: str) -> None:
        if kept := self._blocks.pop(entry, None):
            self.n_bytes -= kept.n_bytes
