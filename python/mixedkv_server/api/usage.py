"""Tokens, times and progress of answers, in the fields of OpenAI and of llama-server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mixedkv.engine import Job


def usage(jobs: Sequence[Job], n: int) -> dict[str, Any]:
    """Return OpenAI's usage. Each prompt counts once, however many choices it has."""
    firsts = jobs[::n]
    prompt_tokens = sum(job.n_given for job in firsts)
    dropped = sum(job.n_dropped for job in jobs)
    answer_tokens = sum(job.n_answer for job in jobs)
    details = {}
    if thoughts := [job.n_thought for job in jobs if job.answer.thought is not None]:
        details["reasoning_tokens"] = sum(thoughts)
    if drafters := [job.answer.drafter for job in jobs if job.answer.drafter is not None]:
        accepted = sum(drafter.n_accepted for drafter in drafters)
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = sum(each.n_drafted for each in drafters) - accepted
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
        "prompt_tokens_details": cached_details(jobs, n),
        **({"completion_tokens_details": details} if details else {}),
        **({"dropped_tokens": dropped} if dropped else {}),
    }


def cached_details(jobs: Sequence[Job], n: int = 1) -> dict[str, Any]:
    """Return what the answers to prompts, `n` to each, started from, and whether they are exact."""
    firsts = jobs[::n]
    approximate = sum(job.n_approximate for job in firsts)
    repair = next((job.method for job in firsts if job.n_approximate and job.method), None)
    return {
        "cached_tokens": sum(job.n_cached_exact for job in firsts),
        "cached_tier": next((job.cached_tier for job in firsts if job.n_cached_exact), None),
        "cached_exact": all(job.exact for job in jobs),
        **({"approximate_cached_tokens": approximate, "cached_repair": repair} if approximate else {}),
    }


def timings(job: Job) -> dict[str, Any]:
    """Return llama-server's field about speed: the evaluated and generated tokens, milliseconds, and tokens
    per second. The first token comes from the prompt's last step, so only those after it took one.
    """
    at = job.t_end if job.t_end is not None else time.perf_counter()
    first = job.t_first if job.t_first is not None else at
    n_cached, n_steps = job.n_cached or 0, max(0, job.n_answer - 1)
    drafter = job.answer.drafter
    drafts = {} if drafter is None else {"draft_n": drafter.n_drafted, "draft_n_accepted": drafter.n_accepted}
    return {
        "cache_n": n_cached,
        **_rate("prompt", job.n_prompt - n_cached, job.n_prompt - n_cached, first - job.t_submit),
        **_rate("predicted", job.n_answer, n_steps, at - first),
        **drafts,
    }


def _rate(name: str, n: int, n_steps: int, seconds: float) -> dict[str, Any]:
    milliseconds = round(1e3 * seconds, 3)
    return {
        f"{name}_n": n,
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / n_steps if n_steps else 0.0,
        f"{name}_per_second": 1e3 * n_steps / max(milliseconds, 1e-3),
    }


class PromptProgress:
    """Makes llama-server's field about a prompt in a stream: as time goes by, and before the answer begins. A
    prompt that took no time is told with what was cached, and then as done.

    Args:
        requested: whether it is asked for.
    """

    def __init__(self, job: Job, requested: bool | None) -> None:
        self._job, self._requested = job, bool(requested)
        self._told = -1  # tokens

    def now(self) -> dict[str, Any] | None:
        """Return the tokens of the prompt, the cached and the evaluated ones. None when it is done."""
        seq = self._job.seq  # the engine's thread sets it
        if self._job.evaluated or not self._requested:
            return None
        return self._fields(min(len(seq.tokens) if seq is not None else 0, self._job.n_prompt))

    def done(self) -> list[dict[str, Any]]:
        """Return what is to be told before the first event of an answer."""
        requested, self._requested = self._requested, False
        if not requested:
            return []
        job = self._job
        first = [self._fields(job.n_cached or 0)] if self._told < 0 else []
        return [*first, self._fields(job.n_prompt)] if self._told < job.n_prompt else first

    def _fields(self, n: int) -> dict[str, Any]:
        job, self._told = self._job, n
        at = job.t_first if job.t_first is not None else time.perf_counter()
        times = round(1000 * (at - job.t_submit))
        return {"total": job.n_prompt, "cache": job.n_cached or 0, "processed": n, "time_ms": times}
