"""A `StoreConnector` that also finds passages of a prompt that were computed in other prompts, see
docs/passages.md.

A sample of the answers is also evaluated exactly, a slice at a time, while the engine has nothing else to do.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any

import numpy as np

from mixedkv.chunks.assembly import Assembly
from mixedkv.chunks.chunk_part import ChunkPart
from mixedkv.chunks.chunk_reuse import ChunkChoice, ChunkReuse
from mixedkv.chunks.gate import Gate, Logits, Waiting, compare, logits_at
from mixedkv.chunks.passages import Passages
from mixedkv.engine.connectors.kv_connector import ConnectedEngine
from mixedkv.engine.connectors.store_connector import Offer, StoreConnector
from mixedkv.engine.jobs.job import Job
from mixedkv.engine.schedule.request import Request
from mixedkv.errors import ClosedError
from mixedkv.prefix.sequences import NO_MATCH, Sequence
from mixedkv.store import KVStore

log = logging.getLogger("mixedkv.engine")

_LOOK_AGAIN = 0.05  # seconds between two looks whether the engine is idle


class ChunkConnector(StoreConnector):
    """Stores, fetches and finds passages for one engine: a `KVConnector`.

    Jobs with `reuse="chunks"`, or without a choice, may use passages. Jobs that keep their prompt for others,
    and jobs with images, never do.

    Args:
        store: closed with the connector.
        **options: of `ChunkOptions`: repair, ratio, overlap_k, chunk_size, max_kld, check, ...

    Raises:
        UnsupportedModelError: from the engine's constructor: rows of this model cannot be moved, or the
            method needs another cache.
        ValueError: from the engine's constructor: a setting is out of range.
    """

    _passages: Passages

    def __init__(self, store: KVStore, *, closes: bool = True, **options: Any) -> None:
        super().__init__(store, closes=closes)
        self._options = options
        self._wake, self._closing = threading.Event(), threading.Event()
        self._checker = threading.Thread(target=self._check_all, name="mixedkv-check", daemon=True)

    def attach(self, engine: ConnectedEngine) -> None:
        """Begin the threads that fetch, offload and check KV; the engine calls it once."""
        self._passages = Passages(engine.llm, self.store, **self._options)
        super().attach(engine)
        if engine.threaded:
            self._checker.start()

    def check(self, request: Request) -> None:
        """Check that this cache can reuse chunks in the way that a request asks for.

        Raises:
            ValueError: the message begins with `chunks`.
        """
        if request.reuse_options is None:
            return
        if request.reuse in (False, "exact", "prefix"):
            raise ValueError(f"chunks: they cannot be reused with reuse={request.reuse!r}: leave one out")
        if request.prompt_logprobs is not None:
            raise ValueError("chunks: they cannot be reused with prompt_logprobs: leave one out")
        self._passages.chosen(_choice(request))

    def fetch(self, job: Job) -> bool:
        """Have the KV of a job's prompt looked for, passages included where they may be reused."""
        request, closed = job.request, self._passages.gate.closed
        only_evaluates = request.max_tokens == 0 and job.is_stored  # for others, who may want exact rows
        if request.keep or only_evaluates or job.parts or closed:
            if closed and job.prefix.accept in (None, "chunks"):
                job.store_problem = closed
            job.prefix.accept = "exact" if job.prefix.accept == "chunks" else job.prefix.accept
        elif job.prefix.accept is None:
            job.prefix.accept = "chunks"
        return super().fetch(job)

    def evaluated(self, job: Job, index: int) -> None:
        """Keep the logits of a prompt with reused passages, if the prompt will be checked."""
        super().evaluated(job, index)
        gate = self._passages.gate
        if job.work.n_approximate and job.work.method and gate.wants():
            logits = logits_at(self._engine.llm, index)
            gate.add(Waiting(job.prompt, logits, job.tenant))
            self._wake.set()

    def stats(self) -> dict[str, Any]:
        """Return the store's stats, and those of the reuse of chunks."""
        gate = self._passages.gate
        chunks = {
            "method": str(self._passages.method),
            "checked": gate.n_checked,
            "waiting_to_be_checked": gate.n_waiting,
            "kld_mean": gate.kld_mean,
            "same_top1": gate.same_top1,
            "off": gate.closed,
        }
        return {**super().stats(), "chunks": chunks}

    def close(self) -> None:
        """End the checks, store what waits, then close the store."""
        self._closing.set()
        self._wake.set()
        if self._checker.is_alive():
            self._checker.join()
        super().close()

    def _find(self, job: Job) -> Offer | None:
        return super()._find(job) or (Offer(None) if job.prefix.accept == "chunks" else None)

    def _saves_enough(self, job: Job, offer: Offer, n: int) -> bool:
        return job.prefix.accept == "chunks" or super()._saves_enough(job, offer, n)

    def _read(self, job: Job, offer: Offer, n: int) -> None:
        super()._read(job, offer, n)
        if job.prefix.accept != "chunks":
            return
        n_exact = max(job.prefix.n_fetched, n)
        options, method = self._passages.chosen(_choice(job.request))
        found = self._passages.find(job.prompt, self._identity(job.tenant), n_exact, options)
        rows = [(segment, self._rows.cut(blocks)) for segment, blocks in found]
        part = ChunkPart(rows, method, job.n_prompt, partial(_note, job)) if rows else None
        job.import_rows(part.begin if part is not None else 0, part, str(method))

    # --- for an engine without a thread ---

    def refresh(self, tenant: str) -> None:
        """Index the entries that were stored since the last prompt, so that the next prompt need not."""
        self._passages.refresh(self._identity(tenant))

    @property
    def gate(self) -> Gate:
        """The prompts that wait for a check, and whether chunks are reused."""
        return self._passages.gate

    # --- checks, on a thread of their own ---

    def _check_all(self) -> None:
        gate = self._passages.gate
        while not self._closing.is_set():
            self._wake.wait()
            self._wake.clear()
            while gate.n_waiting and not self._closing.wait(0 if self._engine.idle else _LOOK_AGAIN):
                if self._engine.idle and (waiting := gate.take()) is not None:
                    try:
                        self._check(waiting)
                    except ClosedError:
                        return
                    except Exception as error:  # a failed check never fails a request
                        log.warning("a check of reused chunks failed: %s: %s", type(error).__name__, error)

    def _check(self, waiting: Waiting) -> None:
        """Evaluate a prompt exactly and compare. If a job comes meanwhile, the check is postponed."""
        engine, gate = self._engine, self._passages.gate
        seq = engine.call(lambda: self._place(waiting)).result()
        if seq is None:
            return
        try:
            for p0 in range(0, len(waiting.tokens), engine.llm.n_batch):
                if self._closing.is_set() or not engine.idle:
                    gate.add(waiting)
                    return
                logits = engine.call(partial(self._evaluate, seq, waiting, p0)).result()
        finally:
            engine.call(lambda: engine.pool.drop(seq)).result()
        deviation = compare(logits, waiting.logits)
        gate.note(deviation)
        engine.observer.checked(deviation.kld, bool(gate.closed))

    def _place(self, waiting: Waiting) -> Sequence | None:
        """Return a sequence for the check; None if there is no room beside the running jobs."""
        pool, n_ctx = self._engine.pool, self._engine.llm.kv.stats().n_ctx
        while pool.used + len(waiting.tokens) > n_ctx:
            if not pool.evict():
                return None
        return pool.acquire(waiting.tenant, NO_MATCH)

    def _evaluate(self, seq: Sequence, waiting: Waiting, p0: int) -> Logits:
        llm = self._engine.llm
        tokens = waiting.tokens[p0 : p0 + llm.n_batch]
        llm.kv.fill(tokens, np.arange(p0, p0 + len(tokens)), seq.id, logits=True)
        return logits_at(llm, -1)


def _note(job: Job, found: Assembly | Exception) -> None:
    """Note what was put together for a job, or why nothing was."""
    if isinstance(found, Exception):
        job.store_problem = str(found)
        return
    n, n_cached = job.n_prompt, job.n_cached or 0
    job.import_report = ChunkReuse(
        method=found.method.repair,
        ratio=found.method.share_of(n),
        n_exact=found.n_exact,
        n_new=n - n_cached - sum(map(len, found.segments)),
        n_evaluated=found.n_exact - n_cached + found.n_evaluated + 1,
        segments=tuple(found.segments),
        kept=found.kept,
    )


def _choice(request: Request) -> ChunkChoice:
    """Return how a request wants chunks to be found and repaired.

    Raises:
        ValueError: its `reuse_options` are something else.
    """
    options = request.reuse_options
    if options is None:
        return ChunkChoice()
    if not isinstance(options, ChunkChoice):
        raise ValueError(f"reuse_options={options!r}: a ChunkConnector takes a ChunkChoice")
    return options
