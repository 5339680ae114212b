"""Evaluates the images of a step, each in a decode of its own, since a batch has either tokens or vectors."""

from __future__ import annotations

from collections.abc import Iterator

from mixedkv.engine.jobs.job import Job
from mixedkv.engine.schedule.contract import StepPlan
from mixedkv.engine.schedule.scheduler import Scheduler
from mixedkv.images.evaluate import evaluate
from mixedkv.llama import Llama
from mixedkv.native.batch import NO_CELLS

_CannotGoOn = tuple[Job, Exception | None]


def look(llm: Llama, step: StepPlan[Job], scheduler: Scheduler[Job]) -> Iterator[_CannotGoOn]:
    """Evaluate the step's images. Yield jobs that cannot go on, for lack of room or because of an error."""
    for run in step.pictures:
        job = run.job
        if job.seq is None or job.picture is None:  # it gave way to another one
            continue
        code = evaluate(job.picture, llm.kv, job.n_rows, job.seq.id, llm.n_batch)
        if code == 0:
            scheduler.has_rows(run)
        elif code != NO_CELLS:
            yield job, llm.decode_error(code)
        else:
            # some of several decodes may have succeeded, and not every memory can remove a part
            if len(job.picture) > llm.n_batch:
                scheduler.pool.clear(job.seq)
            if (last := scheduler.relieve()) is not None:
                yield last, None
