"""From the body of a request to jobs, and what both completion endpoints tell of them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from mixedkv.engine.chat_template import RenderedChat
from mixedkv.engine.constraint import Constraint, Matcher
from mixedkv.engine.job import Job
from mixedkv.engine.sampler import Sampling
from mixedkv.errors import ContextLengthError
from mixedkv.server.api.schemas import Generation
from mixedkv.server.api_error import bad_request, from_engine
from mixedkv.server.state import ServerState
from mixedkv.sessions import CacheSessionMetadata

_SAMPLING = {each.name for each in fields(Sampling)} & Generation.model_fields.keys() - {
    "seed",
    "logit_bias",
    "dry_sequence_breakers",
}
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
    given = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    if body.dry_sequence_breakers is not None:
        given["dry_sequence_breakers"] = tuple(body.dry_sequence_breakers)
    return Sampling(**given, seed=(seed + choice) % 2**32, logit_bias=bias)


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
    chat: RenderedChat | None = None,
    budget: int | None = None,
    prediction: str = "",
) -> list[Job]:
    """`body.n` jobs for each prompt. Not for the event loop: constraints take time to compile.

    Args:
        chat: how the prompt was rendered and the answers are to be made, where llama.cpp's chat layer knows.
        budget: tokens after which a thought is ended.
        prediction: what an answer may be.

    Raises:
        ApiError: 400.
    """
    n, tokenizer = body.n or 1, server.engine.tokenizer
    max_tokens = server.engine.n_ctx if max_tokens is None else max_tokens
    _check_tokens(server, body, max_tokens)
    _check_logprobs(server, n * len(prompts), max_tokens, n_logprobs)
    if n * len(prompts) > server.engine.most_jobs(owner):
        raise bad_request(f"n={n} for {len(prompts)} prompts is more than this server queues", "n")
    jobs = []
    matcher = _matcher(server, constraint)
    _check_reuse(server, body)
    reuse = body.use_kv_cache is not False
    thoughts = chat.thoughts if chat is not None else None
    shown = tokenizer.shown(chat.shown) if chat is not None else ()
    n_forgotten = len(tokenizer.tokenize(chat.answer, start=False, special=True)) if chat is not None else 0
    for prompt in prompts:
        try:
            server.engine.check_prompt(len(prompt))
        except ContextLengthError as error:
            raise from_engine(error, param) from None
        try:
            drafter = server.engine.drafter(prompt, body.speculation, prediction)
        except ValueError as error:
            raise bad_request(f"prediction: {error}", "prediction") from None
        for choice in range(n):
            try:
                sampler = tokenizer.sampler(sampling(body, choice), matcher)
            except ValueError as error:
                raise bad_request(str(error), str(error).partition(":")[0]) from None
            job = Job(
                prompt,
                max_tokens=max_tokens,
                sampler=sampler,
                tenant=owner,
                stop=[*body.stops, *stops],
                stream=bool(body.stream),
                n_logprobs=n_logprobs,
                ignore_end=bool(body.ignore_eos),
                reuse=(body.reuse or True) if reuse else choice > 0,
                store=reuse,
                session=session.kv_cache_ref if session is not None else None,
                min_tokens=body.min_tokens or 0,
                stop_tokens=body.stop_token_ids or (),
                shown=shown,
                thought=tokenizer.thought(thoughts, budget) if thoughts is not None else None,
                boundary=len(prompt) - n_forgotten if thoughts is not None else 0,
                drafter=drafter.copy() if drafter is not None else None,
            )
            jobs.append(job)
    return jobs


def prompt_progress(job: Job) -> dict[str, Any] | None:
    """llama-server's: tokens of the prompt, found and evaluated ones; None when all are."""
    seq = job.seq  # the engine's thread sets it
    if job.evaluated:
        return None
    return {
        "total": job.n_prompt,
        "cache": job.n_cached or 0,
        "processed": min(len(seq.tokens) if seq is not None else 0, job.n_prompt),
        "time_ms": round(1000 * (time.perf_counter() - job.t_submit)),
    }


def usage(jobs: Sequence[Job], n: int) -> dict[str, Any]:
    """OpenAI's usage: each prompt counts once, however many choices it has."""
    firsts = jobs[::n]
    prompt_tokens = sum(job.n_prompt for job in firsts)
    answer_tokens = sum(job.n_answer for job in jobs)
    details = {}
    if thoughts := [job.thought.n_tokens for job in jobs if job.thought is not None]:
        details["reasoning_tokens"] = sum(thoughts)
    if drafters := [job.drafter for job in jobs if job.drafter is not None]:
        accepted = sum(drafter.n_accepted for drafter in drafters)
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = sum(each.n_drafted for each in drafters) - accepted
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(job.n_cached_exact for job in firsts),
            "cached_tier": next((job.cached_tier for job in firsts if job.n_cached_exact), None),
            "cached_exact": all(job.exact for job in firsts),
            **_approximate(firsts),
        },
        **({"completion_tokens_details": details} if details else {}),
    }


def _approximate(jobs: Sequence[Job]) -> dict[str, Any]:
    """What else was not evaluated, and how passages among it were repaired."""
    n = sum(job.n_approximate for job in jobs)
    method = next((str(job.method) for job in jobs if job.n_approximate and job.method), None)
    return {"approximate_cached_tokens": n, "cached_repair": method} if n else {}


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


def _check_reuse(server: ServerState, body: Generation) -> None:
    if body.reuse == "chunks" and server.settings.reuse != "chunks":
        raise bad_request(
            "this server reuses no chunks: start it with --reuse chunks, or ask for exact or prefix", "reuse"
        )
    if body.reuse is not None and body.use_kv_cache is False:
        raise bad_request(f"reuse={body.reuse} and use_kv_cache=false exclude each other: give one", "reuse")


def _check_tokens(server: ServerState, body: Generation, max_tokens: int) -> None:
    if (body.min_tokens or 0) > max_tokens:
        raise bad_request(f"min_tokens={body.min_tokens} is more than max_tokens={max_tokens}", "min_tokens")
    n_vocab = server.engine.tokenizer.n_vocab
    if bad := next((token for token in body.stop_token_ids or () if token >= n_vocab), None):
        raise bad_request(
            f"stop_token_ids: token {bad} is not one of this model's {n_vocab}", "stop_token_ids"
        )


def _check_logprobs(server: ServerState, n: int, max_tokens: int, n_logprobs: int | None) -> None:
    """They take a hundred times the memory of the text."""
    n_tokens = min(max_tokens, server.engine.n_ctx)
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
