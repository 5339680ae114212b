"""Loads fetched rows into the sequences of jobs, between steps."""

from __future__ import annotations

import logging

from mixedkv.engine.connect.passage_rows import PassageRows
from mixedkv.engine.connect.rechecking import evaluate_copy
from mixedkv.engine.jobs.job import Job
from mixedkv.engine.schedule.contract import StepPlan
from mixedkv.engine.schedule.observer import Observer
from mixedkv.engine.schedule.scheduler import Scheduler
from mixedkv.llama import Llama
from mixedkv.store.recheck import Doubt

log = logging.getLogger("mixedkv.engine")


class Loader:
    """Loads fetched rows, on the engine's thread. Tokens whose rows cannot be loaded are evaluated."""

    def __init__(self, llm: Llama, scheduler: Scheduler[Job], observer: Observer) -> None:
        self._llm, self._scheduler, self._observer = llm, scheduler, observer

    def restore(self) -> None:
        """Load one fetched block, so that a long chain is spread over several steps."""
        job = next((job for job in self._scheduler.running if job.blocks), None)
        if job is None:
            return
        assert job.seq is not None
        block = job.blocks.pop(0)
        try:
            self._llm.kv.load(block, seq=job.seq.id, more=bool(job.blocks))
            job.seq.tokens.extend(block.tokens.tolist())
            job.seq.checkpoints.extend(block.checkpoints)
        except Exception as error:
            log.warning("a stored block could not be loaded: %s", error)
            self._observer.restore_failed("load")
            self._scheduler.refetch(job)
        if not job.blocks and job.doubt is not None:
            self._recheck(job)
        if not job.evaluated:  # not after a pause or a preemption
            job.set_cached(job.n_rows)
        if not job.blocks:
            self._observer.restored(job)

    def _recheck(self, job: Job) -> None:
        """Compare stored rows with the model if that was not done yet. If they are wrong, the job evaluates
        its whole prompt.
        """
        doubt, job.doubt = job.doubt, None
        assert isinstance(doubt, Doubt)
        assert job.seq is not None
        try:
            problem = evaluate_copy(self._llm, self._scheduler.pool, job.seq, doubt)
        except Exception as error:  # rows that cannot be compared are not used
            problem = f"it could not be compared: {error}"
            log.warning("stored rows could not be compared with the model: %s", error)
        self._observer.rechecked(problem)
        if problem:
            self._observer.restore_failed("wrong")
            self._scheduler.refetch(job)

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
