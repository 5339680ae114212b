"""Puts stored rows that were fetched for a job into its sequence, on the engine's thread."""

from __future__ import annotations

import logging
from array import array

from mixedkv.engine.jobs.job import Job
from mixedkv.engine.schedule.contract import Observer
from mixedkv.engine.schedule.scheduler import Scheduler
from mixedkv.kv.cache import KVCache
from mixedkv.kv.fetched import Fetched, WrongRowsError

log = logging.getLogger("mixedkv.engine")


class Restorer:
    """Loads fetched rows between steps. Tokens whose rows cannot be loaded are evaluated."""

    def __init__(self, kv: KVCache, scheduler: Scheduler[Job], observer: Observer) -> None:
        self._kv, self._scheduler, self._observer = kv, scheduler, observer

    def restore(self) -> None:
        """Load one fetched block, so that a long chain is spread over several steps. Where rows are refused
        or wrong, the job evaluates its whole prompt.
        """
        job = next((job for job in self._scheduler.running if job.prefix.is_loading), None)
        if job is None:
            return
        fetched = job.prefix.fetched
        assert isinstance(fetched, Fetched)
        unverified = fetched.unverified is not None
        try:
            self._advance(job, fetched)
            if unverified and fetched.unverified is None:
                self._observer.rechecked("")
        except Exception as error:
            log.warning("stored rows could not be loaded: %s", error)
            if unverified and fetched.unverified is None:
                self._observer.rechecked(str(error))
            self._observer.restore_failed("wrong" if isinstance(error, WrongRowsError) else "load")
            self._scheduler.refetch(job)
        if not job.work.evaluated:  # not after a pause or a preemption
            pool, seq, n = self._scheduler.pool, job.seq, job.n_rows
            exact = seq is None or job.prefix.is_loading or pool.continues_exactly(seq, n)
            job.work.set_cached(n, exact)
        if not job.prefix.is_loading:
            self._observer.restored(job)

    def _advance(self, job: Job, fetched: Fetched) -> None:
        """Load the next block that was fetched, and note in the sequence which tokens have rows now. It
        has none after a comparison with evaluated rows; the blocks are then loaded again.
        """
        seq = job.seq
        assert seq is not None
        block = fetched.advance(self._kv, seq.id)
        if block is None:
            seq.tokens, seq.checkpoints = array("i"), []
        else:
            seq.tokens.extend(block.tokens.tolist())
            seq.checkpoints.extend(block.checkpoints)
