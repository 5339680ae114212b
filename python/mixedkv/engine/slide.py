"""Drops the middle of prompts and answers that do not fit the context, see `prompts.overflow`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mixedkv.engine.chat.tokenizer import Tokenizer
from mixedkv.engine.jobs.job import Job
from mixedkv.engine.schedule.scheduler import Scheduler
from mixedkv.prompts.overflow import LongPrompt, Places, cut, head_of
from mixedkv.tokens import Tokens


def fit(job: Job, tokenizer: Tokenizer, n_ctx: int) -> None:
    """Drop the middle of a job's prompt that does not fit, if the job allows it. Call it once, and not on the
    engine's thread: the prompt may be thousands of contexts long.
    """
    if not job.request.slides or job.n_prompt < n_ctx:
        return
    starts = _at_ends(job.prompt, n_ctx, tokenizer.message_starts)
    boundaries = _at_ends(job.prompt, n_ctx, tokenizer.boundaries)
    long = LongPrompt(job.prompt, head_of(starts, n_ctx), n_ctx, starts, tuple(boundaries.tolist()))
    job.leave_out(long, long.to_drop())


def _at_ends(tokens: Tokens, n: int, find: Callable[[Tokens], Places]) -> Places:
    """Return the places in the first n and the last n tokens: no others can stay."""
    if len(tokens) <= 2 * n:
        return find(tokens)
    last = len(tokens) - n
    return np.concatenate([find(tokens[:n]), last + find(tokens[last:])])


def make_room(job: Job, tokenizer: Tokenizer, scheduler: Scheduler[Job], n_ctx: int) -> None:
    """Drop the middle of an answer when the context has no room for its next token."""
    if not job.request.slides or len(job.tokens) < n_ctx:
        return
    starts = tokenizer.message_starts(job.all_tokens)
    head = job.gap.begin if job.gap is not None else head_of(starts, n_ctx)
    scheduler.drop(job, head, cut(len(job.tokens), head, n_ctx, starts))
    scheduler.give_way(job)
