"""A job's next token: its sampler's choice, unless a thought has to end or the answer may not yet."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mixedkv.engine.sample.sampler import Sampler, logits_row, logprob_of
from mixedkv.engine.schedule.job import Delta, Job
from mixedkv.engine.schedule.observer import Observer
from mixedkv.engine.text.detokenizer import Detokenizer
from mixedkv.engine.text.thought import Thought


def go_on(
    job: Job, context: Any, index: int, detokenizer: Detokenizer, observer: Observer, n_ctx: int
) -> tuple[Delta | None, str]:
    """Take a job's next token from the logits of the batch's token `index`: the text that is certain now, and
    why the answer ends here, "" if it does not.

    Raises:
        DeadEndError: the job's constraint allows no token.
    """
    assert job.sampler is not None
    token = next_token(job, job.sampler, context, index, detokenizer)
    now = time.perf_counter()
    observer.token(job, now)
    job.t_first, job.t_last = job.t_first or now, now
    if token in job.stop_tokens or (detokenizer.is_end(token) and not job.ignore_end):
        return None, "stop"
    delta = take(job, token, context, index, detokenizer)
    if job.text.stopped:
        return delta, "stop"
    is_full = len(job.tokens) >= n_ctx and not job.slides
    return delta, "length" if job.n_answer >= job.max_tokens or is_full else ""


def next_token(job: Job, sampler: Sampler, context: Any, index: int, detokenizer: Detokenizer) -> int:
    """From the logits of the batch's token `index`. A constraint holds for what comes after a thought.

    Raises:
        DeadEndError: the job's constraint allows no token.
    """
    thought = job.thought
    token = thought.forced() if thought is not None and not job.text.within_character else None
    if token is not None:
        sampler.accept(token)
    else:
        token = _chosen(job, sampler, context, index, detokenizer)
    follow(job, sampler, piece(job, token, detokenizer))
    return token


def follow(job: Job, sampler: Sampler, text: bytes) -> None:
    """Thoughts and calls of an answer that goes on by a text. What is thought is no call."""
    thought, trigger = job.thought, job.trigger
    thinks = thought is not None and thought.open
    if thought is not None:
        thought.take(text)
    if trigger is not None and not thinks and (matcher := trigger.take(text)) is not None:
        sampler.hold_to(matcher)


def _chosen(job: Job, sampler: Sampler, context: Any, index: int, detokenizer: Detokenizer) -> int:
    never = None
    if job.n_answer < job.min_tokens:
        never = np.array([*detokenizer.ends, *job.stop_tokens], np.int32)
    thought = job.thought
    if thought is None:
        return sampler.sample(context, index, never=never)
    token = sampler.sample(context, index, free=thought.open, also=thought.may_begin, never=never)
    if sampler.constrained and _breaks_off(job, thought, token, detokenizer):
        return thought.close()
    return token


def _breaks_off(job: Job, thought: Thought, token: int, detokenizer: Detokenizer) -> bool:
    """Whether what is constrained would be missing, or begin within this token."""
    return thought.open and (detokenizer.is_end(token) or thought.ends_within(piece(job, token, detokenizer)))


def take(job: Job, token: int, context: Any, index: int, detokenizer: Detokenizer) -> Delta | None:
    """Make a token part of the answer; the text that is certain now."""
    logprob = None
    if job.n_logprobs is not None:
        row = logits_row(context, index, detokenizer.n_vocab)
        logprob = logprob_of(row, token, job.n_logprobs)
    job.tokens.append(token)
    if job.drafter is not None:
        job.drafter.take(token)
    return job.take(piece(job, token, detokenizer), logprob)


def piece(job: Job, token: int, detokenizer: Detokenizer) -> bytes:
    """A token's text in this answer."""
    return detokenizer.name(token) if token in job.shown else detokenizer[token]
