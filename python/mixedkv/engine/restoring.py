"""Rows that were fetched for a prompt go into its sequence."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from mixedkv.engine.job import Job
from mixedkv.engine.observer import Observer
from mixedkv.engine.sequences import SequencePool
from mixedkv.kv.cache import KVCache

log = logging.getLogger("mixedkv.engine")


def restore_block(jobs: Iterable[Job], kv: KVCache, pool: SequencePool, observer: Observer) -> None:
    """Load one block of the first job that has some: a long chain is spread over steps."""
    job = next((job for job in jobs if job.blocks), None)
    if job is None:
        return
    assert job.seq is not None
    block = job.blocks.pop(0)
    try:
        kv.load(block, seq=job.seq.id, more=bool(job.blocks))
        job.seq.tokens.extend(block.tokens.tolist())
        job.seq.checkpoints.extend(block.checkpoints)
    except Exception as error:  # what is not restored is evaluated
        log.warning("a stored block could not be loaded: %s", error)
        observer.restore_failed("load")
        job.forget_blocks()
        pool.clear(job.seq)
    if not job.evaluated:  # not after a pause or a preemption
        job.n_cached = job.n_rows
    if not job.blocks:
        observer.restored(job)
