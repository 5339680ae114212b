"""A `StoreConnector` that also finds passages of a prompt that were computed in other prompts, see
docs/passages.md.
"""

from __future__ import annotations

import logging
from typing import Any

from mixedkv.chunks.chunk_reuse import ChunkChoice
from mixedkv.chunks.passages import Passages
from mixedkv.chunks.stitch import PassageRows
from mixedkv.engine.connect.kv_connector import ConnectedEngine
from mixedkv.engine.connect.store_connector import Offer, StoreConnector
from mixedkv.engine.jobs.job import Job
from mixedkv.store import KVStore

log = logging.getLogger("mixedkv.engine")

_LOOK_AGAIN = 0.05  # seconds between two looks whether the engine is idle


class ChunkConnector(StoreConnector):
    """Stores, fetches and finds passages for one engine: a `KVConnector`.

    Jobs with `reuse="chunks"`, or without a choice, may use passages. Jobs that keep their prompt for others,
    and jobs with images, never do.

    Args:
        store: closed with the connector.
        **options: of `ChunkOptions`: repair, ratio, overlap_k, chunk_size, ...

    Raises:
        UnsupportedModelError, ValueError: from the engine's constructor, as from `ChunkCache`.
    """

    _passages: Passages

    def __init__(self, store: KVStore, *, closes: bool = True, **options: Any) -> None:
        super().__init__(store, closes=closes)
        self._options = options

    def attach(self, engine: ConnectedEngine) -> None:
        """Begin the threads that fetch and offload KV; the engine calls it once."""
        self._passages = Passages(engine.llm, self.store, **self._options)
        super().attach(engine)

    def check(self, choice: ChunkChoice) -> None:
        """Check that this cache can reuse chunks in the way that a request asks for.

        Raises:
            ValueError: the message begins with `chunks.` and the field.
        """
        self._passages.chosen(choice)

    def fetch(self, job: Job) -> bool:
        """Have the KV of a job's prompt looked for, passages included where they may be reused."""
        if job.request.keep or job.request.max_tokens == 0 or job.pictures:
            job.accept = "exact" if job.accept == "chunks" else job.accept
        elif job.accept is None:
            job.accept = "chunks"
        return super().fetch(job)

    def stats(self) -> dict[str, Any]:
        """Return the store's stats, and how passages are repaired."""
        return {**super().stats(), "chunks": {"method": str(self._passages.method)}}

    def _find(self, job: Job) -> Offer | None:
        return super()._find(job) or (Offer(None) if job.accept == "chunks" else None)

    def _is_wanted(self, job: Job, offer: Offer, n: int) -> bool:
        return job.accept == "chunks" or super()._is_wanted(job, offer, n)

    def _read(self, job: Job, offer: Offer, n: int) -> None:
        super()._read(job, offer, n)
        if job.accept != "chunks":
            return
        n_exact = max(job.n_fetched, n)
        options, method = self._passages.chosen(job.request.chunks or ChunkChoice())
        found = self._passages.find(job.prompt, self._identity(job.tenant), n_exact, options)
        rows = [(segment, self._rows.cut(blocks)) for segment, blocks in found]
        job.set_passages(PassageRows(rows, method) if rows else None, str(method))
