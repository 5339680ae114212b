"""Pictures of a step: each is a decode of its own, since a batch is of tokens or of vectors."""

from __future__ import annotations

from collections.abc import Iterator

from mixedkv.engine.schedule.job import Job
from mixedkv.engine.schedule.scheduler import Scheduler, Step
from mixedkv.llama import Llama
from mixedkv.native.batch import NO_CELLS


def look(llm: Llama, step: Step, scheduler: Scheduler) -> Iterator[tuple[Job, Exception | None]]:
    """Evaluate them. Yields jobs that cannot go on: for want of room, or because of an error."""
    for run in step.pictures:
        job = run.job
        if job.seq is None or job.picture is None:  # it gave way to another one
            continue
        code = job.picture.evaluate(llm.kv, job.n_rows, job.seq.id, llm.n_batch)
        if code == 0:
            scheduler.has_rows(run)
        elif code != NO_CELLS:
            yield job, llm.decode_error(code)
        else:
            # of several decodes some may have been made, and not all memories can take a part back
            if len(job.picture) > llm.n_batch:
                scheduler.pool.clear(job.seq)
            if (last := scheduler.relieve()) is not None:
                yield last, None
