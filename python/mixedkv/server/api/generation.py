"""From the body of a request to jobs, and what both completion endpoints tell of them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from mixedkv.engine.constraint import Constraint, Matcher
from mixedkv.engine.job import Job
from mixedkv.engine.sampler import Sampling
from mixedkv.errors import ContextLengthError
from mixedkv.server.api.schemas import Generation
from mixedkv.server.api_error import bad_request, from_engine
from mixedkv.server.state import ServerState
from mixedkv.sessions import CacheSessionMetadata

_MAX_LOGPROBS = 4_000_000  # of one request; 30 to 100 bytes each as JSON


def context_tokens(server: ServerState, session: Any) -> list[int]:
    """Tokens of a session's prompt; of messages those before an answer."""
    if session.prompt is not None:
        return server.engine.tokenizer.prompt(session.prompt)
    messages = [message.model_dump(exclude_none=True) for message in session.messages]
    return server.engine.tokenizer.chat(messages)[0]


def sampling(body: Generation, choice: int) -> Sampling:
    """OpenAI's defaults; each choice gets a seed of its own."""
    seed = body.seed if body.seed is not None else secrets.randbits(32)
    bias = tuple((_token_id(key), value) for key, value in (body.logit_bias or {}).items())
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=body.top_k or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        repeat_penalty=body.repeat_penalty or 1.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        seed=(seed + choice) % 2**32,
        logit_bias=bias,
    )


def make_jobs(
    server: ServerState,
    body: Generation,
    prompts: Sequence[Sequence[int]],
    *,
    owner: str,
    max_tokens: int | None,
    constraint: Constraint | None = None,
    stops: Sequence[str] = (),
    n_logprobs: int | None = None,
    session: CacheSessionMetadata | None = None,
    param: str = "prompt",
    shown: Sequence[int] = (),
) -> list[Job]:
    """`body.n` jobs for each prompt. Not for the event loop: constraints take time to compile.

    Raises:
        ApiError: 400.
    """
    n = body.n or 1
    _check_logprobs(server, n * len(prompts), max_tokens, n_logprobs)
    if n * len(prompts) > server.engine.most_jobs(owner):
        raise bad_request(f"n={n} for {len(prompts)} prompts is more than this server queues", "n")
    jobs = []
    matcher = _matcher(server, constraint)
    reuse = body.use_kv_cache is not False
    for prompt in prompts:
        try:
            server.engine.check_prompt(len(prompt))
        except ContextLengthError as error:
            raise from_engine(error, param) from None
        for choice in range(n):
            try:
                sampler = server.engine.tokenizer.sampler(sampling(body, choice), matcher)
            except ValueError as error:
                raise bad_request(str(error), str(error).partition(":")[0]) from None
            job = Job(
                prompt,
                max_tokens=server.engine.n_ctx if max_tokens is None else max_tokens,
                sampler=sampler,
                tenant=owner,
                stop=[*body.stops, *stops],
                stream=bool(body.stream),
                n_logprobs=n_logprobs,
                ignore_end=bool(body.ignore_eos),
                reuse=reuse or choice > 0,
                store=reuse,
                session=session.kv_cache_ref if session is not None else None,
                shown=shown,
            )
            if n > 1 and choice == 0:
                job.snapshot_at = len(prompt) - 1  # where the other choices start
            jobs.append(job)
    return jobs


def usage(jobs: Sequence[Job], n: int) -> dict[str, Any]:
    """OpenAI's usage: each prompt counts once, however many choices it has."""
    firsts = jobs[::n]
    prompt_tokens = sum(job.n_prompt for job in firsts)
    answer_tokens = sum(job.n_answer for job in jobs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(job.n_cached or 0 for job in firsts),
            "cached_tier": next((job.cached_tier for job in firsts if job.n_cached), None),
            "cached_exact": all(job.exact for job in firsts),
        },
    }


def constraint_of(body: Generation) -> Constraint | None:
    """Of the fields that raw prompts have too.

    Raises:
        ApiError: 400, there are two.
    """
    if body.grammar is not None and body.regex is not None:
        raise bad_request("grammar and regex both say what the answer looks like: give one", "regex")
    if body.grammar is not None:
        return Constraint("gbnf", body.grammar, "grammar")
    return Constraint("regex", body.regex, "regex") if body.regex is not None else None


def _matcher(server: ServerState, constraint: Constraint | None) -> Matcher | None:
    if constraint is None:
        return None
    try:
        return server.engine.tokenizer.matcher(constraint)
    except ValueError as error:
        raise bad_request(str(error), constraint.name) from None


def _check_logprobs(server: ServerState, n: int, max_tokens: int | None, n_logprobs: int | None) -> None:
    """They take a hundred times the memory of the text."""
    n_tokens = min(max_tokens or server.engine.n_ctx, server.engine.n_ctx)
    if n * n_tokens * (n_logprobs or 0) > _MAX_LOGPROBS:
        raise bad_request(
            f"{n} answers of up to {n_tokens} tokens with {n_logprobs} logprobs each are more than the "
            f"{_MAX_LOGPROBS} this server gives at a time: lower max_tokens, n or the number of logprobs",
            "max_tokens",
        )


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit()):
        raise bad_request(f"logit_bias: {key!r} is not a token id", "logit_bias")
    return int(key)
