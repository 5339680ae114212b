"""Makes jobs from requests, with the samplers, constraints and drafters that choose tokens. Runs on any
thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mixedkv.constrain.constraint import Matcher
from mixedkv.constrain.constraint_text import Constraint
from mixedkv.engine.chat.tokenizer import Tokenizer
from mixedkv.engine.draft.speculation import Speculation
from mixedkv.engine.jobs.drafter import Drafter
from mixedkv.engine.jobs.job import AnswerState, CallTrigger, Job
from mixedkv.engine.sample.sampler import PromptLogprobs
from mixedkv.engine.schedule.request import Request
from mixedkv.limits import check_int
from mixedkv.llama import Llama
from mixedkv.prompts.overflow import LongPrompt, Places, head_of
from mixedkv.tokens import Tokens


def prepare(
    requests: Sequence[Request],
    n: int,
    tokenizer: Tokenizer,
    speculation: Speculation,
    n_ctx: int,
    fit: Callable[[Job], None],
) -> list[Job]:
    """Return `n` jobs for each request. Each has its own seed; matchers and drafters are made once and
    copied.

    Args:
        fit: makes a job's prompt fit the context, or raises before any constraint is compiled.

    Raises:
        ContextLengthError: a prompt does not fit, as `fit` says.
        ValueError: constraint, sampling, speculation or prediction cannot be followed; the
            message begins with the field.
    """
    jobs: list[Job] = []
    matchers: dict[tuple[Constraint | None, str], Matcher | None] = {}
    for request in requests:
        choices = [Job(_choice(request, choice) if choice else request) for choice in range(n)]
        for job in choices:
            fit(job)
        constraint = request.sampling.constraint if request.sampling is not None else None
        if (constraint, request.said) not in matchers:
            matchers[constraint, request.said] = _matcher(request, tokenizer)
        drafter = _drafter(request, tokenizer, speculation, n_ctx)
        for choice, job in enumerate(choices):
            mine = drafter.copy() if drafter is not None and choice else drafter
            job.answer_by(_answer(job.request, tokenizer, matchers[constraint, request.said], mine))
        jobs += choices
    return jobs


def _choice(request: Request, choice: int) -> Request:
    """Return the request for a further answer, which may always share the rows of the first one's prompt."""
    sampling = request.sampling
    if sampling is not None:
        sampling = replace(sampling, seed=(sampling.seed + choice) % 2**32)
    return replace(request, sampling=sampling, reuse=request.reuse or True, prompt_logprobs=None)


def _answer(
    request: Request, tokenizer: Tokenizer, matcher: Matcher | None, drafter: Drafter | None
) -> AnswerState:
    triggers, sampler = request.triggers, None
    if request.sampling is not None:
        plain = replace(request.sampling, constraint=None) if triggers else request.sampling
        sampler = tokenizer.sampler(plain, None if triggers else matcher, keeps=request.post_sampling)
    return AnswerState(
        request,
        sampler,
        thought=(
            tokenizer.thought(request.thoughts, request.thought_budget)
            if request.thoughts is not None
            else None
        ),
        trigger=CallTrigger(triggers, matcher.copy()) if triggers and matcher is not None else None,
        drafter=drafter,
        prompt_logprobs=(
            PromptLogprobs(request.prompt, request.prompt_logprobs, tokenizer.n_vocab)
            if request.prompt_logprobs is not None
            else None
        ),
    )


def _matcher(request: Request, tokenizer: Tokenizer) -> Matcher | None:
    """Return the matcher of a request's constraint, after what is said already."""
    constraint = request.sampling.constraint if request.sampling is not None else None
    if constraint is None:
        return None
    try:
        matcher = tokenizer.matcher(constraint)
    except ValueError:
        if request.triggers:  # a call can be made without its constraint
            return None
        raise
    if request.said and not matcher.follow(request.said.encode()):
        raise ValueError(
            f"{constraint.name}: an answer cannot begin with the last message: change that or leave it out"
        )
    return matcher


def _drafter(request: Request, tokenizer: Tokenizer, speculation: Speculation, n_ctx: int) -> Drafter | None:
    if request.parts or request.sampling is None:
        return None
    predicted: Sequence[int] = ()
    if request.prediction:
        try:
            predicted = tokenizer.tokenize(request.prediction, start=False)
        except ValueError as error:
            raise ValueError(f"prediction: {error}") from None
    prompt: Tokens | Sequence[int] = request.prompt[-n_ctx:]  # a prompt that slides may be longer
    return speculation.drafter(prompt, request.speculation, predicted)


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


def check_model(llm: Llama, parallel: int | None) -> int:
    """Return how many answers are made at a time: `parallel`, or half of the sequences, but no more than
    layers with a sliding window have room for.

    Raises:
        ValueError: the `Llama` was not made for an engine, or `parallel` is too large; the message says how
            to make it.
    """
    n_seq = llm.context_params.n_seq_max
    if not llm.context_params.kv_unified or n_seq < 2:
        raise ValueError(
            f"an engine needs sequences that share one cache, and this Llama has n_seq_max={n_seq} and "
            f"kv_unified={bool(llm.context_params.kv_unified)}: make it with Llama(..., n_seq_max=16, "
            f"kv_unified=True)"
        )
    parallel = n_seq // 2 if parallel is None else check_int("parallel", parallel)
    if not 1 <= parallel < min(n_seq, llm.n_batch + 1):
        raise ValueError(
            f"parallel={parallel}: use fewer than the context's {n_seq} sequences (n_seq_max), "
            f"and n_batch={llm.n_batch} at most"
        )
    return min(parallel, llm.n_windows or parallel)


def check_alone(parallel: int | None) -> int:
    """Return how many answers are made at a time without a thread: one.

    Raises:
        ValueError: `parallel` is another number.
    """
    if parallel not in (None, 1):
        raise ValueError(
            f"parallel={parallel}: without a thread of its own an engine answers one at a time: leave it "
            f"out, or give threaded=True a Llama(..., n_seq_max=16, kv_unified=True)"
        )
    return 1


def lend(
    models: Sequence[Llama], close: weakref.WeakMethod[Callable[[], None]], *, alone: bool = True
) -> None:
    """Have the models call `close` before they close.

    Args:
        alone: refuse other callers that evaluate with them until then.
    """
    for llm in models:
        if alone:
            llm.lend(True)
        llm.at_close(lambda: (function := close()) and function())
