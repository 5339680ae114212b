"""Loads fetched rows into the sequences of jobs, between steps."""

from __future__ import annotations

import logging
from array import array

from mixedkv.chunks.stitch import PassageRows
from mixedkv.engine.jobs.job import Job
from mixedkv.engine.schedule.contract import StepPlan
from mixedkv.engine.schedule.observer import Observer
from mixedkv.engine.schedule.scheduler import Scheduler
from mixedkv.kv.fetched import Fetched, WrongRowsError
from mixedkv.llama import Llama

log = logging.getLogger("mixedkv.engine")


class Loader:
    """Loads fetched rows, on the engine's thread. Tokens whose rows cannot be loaded are evaluated."""

    def __init__(self, llm: Llama, scheduler: Scheduler[Job], observer: Observer) -> None:
        self._llm, self._scheduler, self._observer = llm, scheduler, observer

    def restore(self) -> None:
        """Load one fetched block, so that a long chain is spread over several steps. Where rows are refused
        or wrong, the job evaluates its whole prompt.
        """
        job = next((job for job in self._scheduler.running if job.is_loading), None)
        if job is None:
            return
        seq, fetched = job.seq, job.fetched
        assert seq is not None
        assert isinstance(fetched, Fetched)
        doubted = fetched.doubt is not None
        try:
            block = fetched.advance(self._llm.kv, seq.id)
            if block is None:
                seq.tokens, seq.checkpoints = array("i"), []
            else:
                seq.tokens.extend(block.tokens.tolist())
                seq.checkpoints.extend(block.checkpoints)
            if doubted and fetched.doubt is None:
                self._observer.rechecked("")
        except Exception as error:
            log.warning("stored rows could not be loaded: %s", error)
            if doubted and fetched.doubt is None:
                self._observer.rechecked(str(error))
            self._observer.restore_failed("wrong" if isinstance(error, WrongRowsError) else "load")
            self._scheduler.refetch(job)
        if not job.evaluated:  # not after a pause or a preemption
            job.set_cached(job.n_rows)
        if not job.is_loading:
            self._observer.restored(job)

    def stitch(self, step: StepPlan[Job]) -> None:
        """Put passages together, up to the number of tokens that the step allows."""
        for job, n in ((run.job, run.n) for run in step.stitches):
            passages, seq = job.passages, job.seq
            assert isinstance(passages, PassageRows)
            assert seq is not None
            try:
                if not passages.advance(self._llm, job.prompt, job.n_rows, seq.id, n):
                    job.stitched(passages.n_kept)
            except Exception as error:
                log.warning("passages could not be put together: %s", error)
                self._observer.restore_failed("passages")
                job.set_passages(None, "")
                self._scheduler.pool.clear(seq)
                job.set_cached(0)
