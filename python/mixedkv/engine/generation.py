"""The report of an answer: its text, and what of its prompt was reused, evaluated and stored."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from mixedkv.chunks.chunk_reuse import ChunkReuse
from mixedkv.engine.jobs.job import Job
from mixedkv.engine.sample.sampler import TokenLogprob


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """An answer and what it took.

    Attributes:
        message: the answer to a chat, in OpenAI's form with a `message_id`, to append to the messages.
        tokens: of the answer.
        finish_reason: "stop", "tool_calls", or "length" at max_tokens or the context's end.
        ttft_ms, total_ms: time from the call to the first token and to the end, with tokenizing, waiting and
            the store. After `warm`, which generates no token, both are the time to the end.
        prompt_tokens: tokens of the prompt, as OpenAI counts them.
        cached, evaluated: tokens of the prompt that had KV already, and that were evaluated. The others were
            dropped before, see `overflow`.
        completion_tokens: tokens of the answer.
        dropped: tokens of prompt and answer that are no longer in the context.
        stored: tokens newly stored when the call returned; an engine with a thread stores them later.
        tier: where the cached tokens' KV came from: "context", "ram", "disk" or "remote"; "" if all were
            evaluated.
        exact: the answer equals that of an evaluation from the first token.
        approximate: tokens of the prompt whose rows come from another prompt.
        matched_message_id: the newest message of a chat whose stored KV the prompt goes on from.
        logprobs: of the answer's tokens, if they were asked for.
        chunks: how chunks of other prompts were put together; None where there are none.
        reason: why something stored could not be used, or the answer not be stored.
    """

    text: str
    message: dict[str, Any]
    tokens: tuple[int, ...]
    finish_reason: str
    ttft_ms: float
    total_ms: float
    prompt_tokens: int
    cached: int
    evaluated: int
    completion_tokens: int
    dropped: int
    stored: int
    tier: str
    exact: bool
    approximate: int
    matched_message_id: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    chunks: ChunkReuse | None = None
    reason: str = ""

    @property
    def cached_exact(self) -> int:
        """Cached tokens of the prompt whose rows equal those of an evaluation."""
        return self.cached - self.approximate

    @property
    def kv_reuse_ratio(self) -> float:
        """Share of the prompt's tokens that were not evaluated, 0 to 1."""
        return 1 - self.evaluated / self.prompt_tokens

    @property
    def message_id(self) -> str:
        """Id of the answer to a chat."""
        return str(self.message["message_id"])


def generation_of(
    job: Job,
    text: str,
    reason: str,
    called: float,
    *,
    message: dict[str, Any] | None = None,
    matched: str | None = None,
    logprobs: tuple[TokenLogprob, ...] = (),
) -> Generation:
    """Return the report of a job, which was called for at a time of `time.perf_counter`."""
    end = job.t_end or time.perf_counter()
    return Generation(
        text=text,
        message=message or {"role": "assistant", "content": text},
        tokens=tuple(job.tokens[job.n_prompt :]),
        finish_reason=reason,
        ttft_ms=1000 * ((job.t_first or end) - called),
        total_ms=1000 * (end - called),
        prompt_tokens=job.n_given,
        cached=job.n_cached or 0,
        evaluated=job.n_evaluated,
        completion_tokens=job.n_answer,
        dropped=job.n_dropped,
        stored=job.n_stored,
        tier=job.cached_tier,
        exact=job.exact and not job.n_dropped,
        approximate=job.n_approximate,
        matched_message_id=matched,
        logprobs=logprobs,
        chunks=report if isinstance(report := job.import_report, ChunkReuse) else None,
        reason=job.store_problem,
    )
