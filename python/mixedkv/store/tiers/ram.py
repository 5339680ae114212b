"""Blocks in memory: the least recently used leave when the budget is full."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from threading import Lock

from mixedkv.kv.block import KVBlock


class RamTier:
    """Blocks by entry id, `max_bytes` of them at most. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        self._blocks: OrderedDict[str, tuple[KVBlock, int]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, entry: str) -> bool:
        return entry in self._blocks

    def get(self, entry: str) -> KVBlock | None:
        with self._lock:
            if entry not in self._blocks:
                return None
            self._blocks.move_to_end(entry)
            return self._blocks[entry][0]

    def put(self, entry: str, block: KVBlock) -> None:
        """Keep a block; one that is larger than the budget is not kept."""
        n_bytes = block.nbytes
        if n_bytes > self.max_bytes:
            return
        with self._lock:
            self._drop(entry)
            while self.n_bytes + n_bytes > self.max_bytes:
                self._drop(next(iter(self._blocks)))
            self._blocks[entry] = block, n_bytes
            self.n_bytes += n_bytes

    def remove(self, entry: str) -> None:
        with self._lock:
            self._drop(entry)

    def keep_only(self, entries: Collection[str]) -> None:
        """Drop what is not among `entries`: another process may have removed it from the folder."""
        with self._lock:
            for entry in self._blocks.keys() - set(entries):
                self._drop(entry)

    def _drop(self, entry: str) -> None:
        _, n_bytes = self._blocks.pop(entry, (None, 0))
        self.n_bytes -= n_bytes
