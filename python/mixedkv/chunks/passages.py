"""Passages of a prompt that were computed elsewhere: which there are, whether they may be used, and how they
are then repaired. What a `ChunkCache` and an engine have in common.
"""

from __future__ import annotations

import warnings

import numpy as np
import numpy.typing as npt

from mixedkv.chunks.calibration import read_calibration
from mixedkv.chunks.chunk_reuse import Repair
from mixedkv.chunks.donors import DonorIndex
from mixedkv.chunks.fingerprints import WIDTH, TextEnds
from mixedkv.chunks.gate import Gate
from mixedkv.chunks.plan import find_segments
from mixedkv.chunks.repair import Method
from mixedkv.chunks.stitch import Rows
from mixedkv.chunks.support import check_memory, check_method, check_model
from mixedkv.llama import Llama
from mixedkv.store import Identity, KVStore
from mixedkv.tokens import Tokens

_INDEXES = 64  # identities, so tenants, whose donors are kept at hand


class UncalibratedWarning(UserWarning):
    """Nobody has measured what reuse of chunks does to this model."""


class Passages:
    """Finds passages. Arguments and errors are those of `ChunkCache`; one thread at a time.

    Attributes:
        method: how they are repaired.
        gate: whether they may be used.
    """

    def __init__(
        self,
        llm: Llama,
        store: KVStore,
        *,
        chunk_size: int = 64,
        boundary_window: int = 16,
        max_donors: int = 4,
        repair: Repair | None = None,
        ratio: float | None = None,
        overlap_k: int | None = None,
        max_kld: float = 0.01,
        check: float = 0.01,
        seed: int | None = None,
    ) -> None:
        check_memory(llm)
        n_ctx = llm.kv.stats().n_ctx
        _check_whole("chunk_size", chunk_size, 2 * WIDTH, n_ctx, f"the context has {n_ctx} tokens")
        _check_whole("boundary_window", boundary_window, 0, chunk_size // 2, "half of chunk_size")
        _check_whole("max_donors", max_donors, 1, 1024)
        self._store = store
        self._sizes = {"chunk_size": chunk_size, "max_donors": max_donors}
        self._window = boundary_window
        identity = Identity.of(llm)
        check_model(llm, identity, chunk_size)
        self.gate = Gate(max_kld, check, seed)
        given = any(value is not None for value in (repair, ratio, overlap_k))
        chosen = None if given else self._calibrated(identity)
        self.method = chosen or Method(repair=repair or "query", ratio=ratio, overlap_k=overlap_k)
        check_method(llm, self.method)
        self._ends = TextEnds(llm)
        self._indexes: dict[bytes, DonorIndex] = {}

    def find(self, tokens: Tokens, identity: Identity, n_exact: int) -> Rows:
        """What stands behind the first `n_exact` tokens, whose rows are there, and behind the first chunk;
        nothing while the gate is closed.
        """
        if self.gate.closed:
            return []
        index, ends = self.refresh(identity), self._ends.of(tokens)
        low = max(n_exact, self._head(ends))
        rows = []
        for segment in find_segments(index, tokens, ends, low=low, window=self._window):
            blocks = index.read(segment.source, segment.at, segment.at + len(segment))
            if blocks is not None:
                rows.append((segment, blocks))
        return rows

    def refresh(self, identity: Identity) -> DonorIndex:
        """The donors there are, those included that were stored since the last time."""
        index = self._indexes.pop(identity.digest, None)
        if index is None:
            index = DonorIndex(self._store, identity, **self._sizes)
            while len(self._indexes) >= _INDEXES:
                del self._indexes[next(iter(self._indexes))]
        self._indexes[identity.digest] = index  # the last one used stands last
        index.refresh()
        return index

    def _head(self, ends: npt.NDArray[np.int8]) -> int:
        """How many tokens at the beginning are always exact: the sinks, and the first chunk up to the end of
        a sentence.
        """
        size, window = self._sizes["chunk_size"], self._window
        near = ends[size - 1 : size + window]
        return size + (int(np.argmax(near == near.max())) if near.any() else 0)

    def _calibrated(self, identity: Identity) -> Method | None:
        folder = self._store.folder
        found = read_calibration(folder, identity) if folder is not None else None
        if found is None:
            warnings.warn(
                "what reuse of chunks does to this model has not been measured: run `mixedkv bench reuse "
                "--calibrate`, or choose a repair yourself",
                UncalibratedWarning,
                stacklevel=4,
            )
            return None
        if found.chosen is None:
            self.gate.close(f"no method met max_kld={found.max_kld:g} when this model was calibrated")
            return None
        return found.chosen.method


def _check_whole(field: str, value: int, low: int, high: int, why: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        reason = f" ({why})" if why else ""
        raise ValueError(f"{field}={value!r}: use a whole number from {low} to {high}{reason}")
