"""Chooses a job's next token: its sampler's choice, unless a thought has to end or the answer may not end
yet.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mixedkv.engine.jobs.answer_state import AnswerState
from mixedkv.engine.jobs.events import Delta
from mixedkv.engine.jobs.job import Job
from mixedkv.engine.sample.sampler import Sampler, logits_row, logprob_of
from mixedkv.engine.schedule.observer import Observer
from mixedkv.engine.text.detokenizer import Detokenizer
from mixedkv.engine.text.thought import Thought


def go_on(
    job: Job, context: Any, index: int, detokenizer: Detokenizer, observer: Observer, n_ctx: int
) -> tuple[Delta | None, str]:
    """Choose a job's next token from the logits of the batch's token `index`. Return the text that is certain
    now, and why the answer ends here, "" if it does not.

    Raises:
        DeadEndError: the job's constraint allows no token.
    """
    answer, request = job.answer, job.request
    token = next_token(job, context, index, detokenizer)
    now = time.perf_counter()
    observer.token(job, now)
    job.chose(now)
    if token in answer.stop_tokens or (detokenizer.is_end(token) and not request.ignore_end):
        if request.n_logprobs is not None and request.prompt_logprobs is not None:
            row = logits_row(context, index, detokenizer.n_vocab)
            answer.end_by(logprob_of(row, token, request.n_logprobs))
        return None, "stop"
    delta = _add(job, token, context, index, detokenizer)
    if answer.text.stopped:
        return delta, "stop"
    is_full = len(job.tokens) >= n_ctx and not request.slides
    return delta, "length" if job.n_answer >= request.max_tokens or is_full else ""


def next_token(job: Job, context: Any, index: int, detokenizer: Detokenizer) -> int:
    """Choose from the logits of the batch's token `index`. A constraint applies after a thought only.

    Raises:
        DeadEndError: the job's constraint allows no token.
    """
    answer = job.answer
    assert answer.sampler is not None
    thought = answer.thought
    token = thought.forced() if thought is not None and not answer.text.within_character else None
    if token is not None:
        answer.sampler.accept(token)
    else:
        token = _chosen(job, answer.sampler, context, index, detokenizer)
    follow(answer, piece(answer, token, detokenizer))
    return token


def follow(answer: AnswerState, text: bytes) -> None:
    """Update the answer's thought and call trigger with the next text. A call within a thought does not
    count.
    """
    thought, trigger = answer.thought, answer.trigger
    thinks = thought is not None and thought.open
    if thought is not None:
        thought.take(text)
    if trigger is not None and not thinks and (matcher := trigger.take(text)) is not None:
        assert answer.sampler is not None
        answer.sampler.hold_to(matcher)


def _chosen(job: Job, sampler: Sampler, context: Any, index: int, detokenizer: Detokenizer) -> int:
    answer, never = job.answer, None
    if job.n_answer < job.request.min_tokens:
        never = np.array([*detokenizer.ends, *answer.stop_tokens], np.int32)
    thought = answer.thought
    if thought is None:
        return sampler.sample(context, index, never=never)
    token = sampler.sample(context, index, free=thought.open, also=thought.may_begin, never=never)
    if sampler.constrained and _breaks_off(answer, thought, token, detokenizer):
        return thought.close()
    return token


def _breaks_off(answer: AnswerState, thought: Thought, token: int, detokenizer: Detokenizer) -> bool:
    """Return whether the constrained part would be missing, or begin within this token."""
    if not thought.open:
        return False
    return detokenizer.is_end(token) or thought.ends_within(piece(answer, token, detokenizer))


def _add(job: Job, token: int, context: Any, index: int, detokenizer: Detokenizer) -> Delta | None:
    """Add a token to the answer and return the text that is certain now."""
    answer, n_top, logprob = job.answer, job.request.n_logprobs, None
    if n_top is not None:
        logprob = logprob_of(logits_row(context, index, detokenizer.n_vocab), token, n_top)
    job.tokens.append(token)
    if answer.drafter is not None:
        answer.drafter.take(token)
    return answer.add(piece(answer, token, detokenizer), logprob)


def piece(answer: AnswerState, token: int, detokenizer: Detokenizer) -> bytes:
    """Return a token's text in this answer."""
    return detokenizer.name(token) if token in answer.shown else detokenizer[token]
