"""Answers prompts one by one or together, and evaluates only the part of each that is new."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast, overload

from mixedkv.engine.answer import Answer
from mixedkv.engine.chat.tokenizer import Prompt
from mixedkv.engine.connect.chunk_connector import ChunkConnector
from mixedkv.engine.connect.store_connector import StoreConnector
from mixedkv.engine.engine import Engine
from mixedkv.engine.jobs.job import Job
from mixedkv.engine.schedule.request import Request
from mixedkv.llama import Llama
from mixedkv.start.sequences import Reuse
from mixedkv.store import KVStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """An answer and what it took.

    Attributes:
        tokens: of the answer.
        finish_reason: "stop", or "length" at max_tokens or the context's end.
        ttft_ms, total_ms: time from the call to the first token and to the end, with tokenizing, waiting and
            the store. After `warm`, which generates no token, both are the time to the end.
        prompt_tokens, evaluated: tokens of the prompt: all of them, and those that were evaluated.
        tier: where the other tokens' KV came from: "context", "ram", "disk" or "remote"; "" if all were
            evaluated.
        exact: the answer equals that of an evaluation from the first token.
        approximate: tokens of the prompt whose rows come from another prompt.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    ttft_ms: float
    total_ms: float
    prompt_tokens: int
    evaluated: int
    tier: str
    exact: bool
    approximate: int

    @property
    def kv_reuse_ratio(self) -> float:
        """Share of the prompt's tokens that were not evaluated, 0 to 1."""
        return 1 - self.evaluated / self.prompt_tokens


class PromptCache:
    """Answers prompts on one `Llama`, with the KV of what they have in common.

    >>> llm = Llama("model.gguf", kv="mixed", n_ctx=8192, n_seq_max=16, kv_unified=True)
    >>> with PromptCache(llm, KVStore("kv-folder")) as cache:
    ...     cache.warm(document)
    ...     answers = cache.generate_batch([document + question for question in questions])

    Args:
        llm: used by the cache alone until the cache is closed; left open then.
        store: keeps KV, also for the next process; closed with the cache. None keeps KV in the context only.
        reuse: "chunks" also reuses passages of other prompts, see docs/passages.md; without a store they are
            kept in memory.
        **options: of `Engine`: parallel, exact_only, ...

    Raises:
        ValueError: as `Engine`.
    """

    def __init__(
        self, llm: Llama, store: KVStore | None = None, *, reuse: Reuse = "exact", **options: Any
    ) -> None:
        connector: StoreConnector | None = None
        if reuse == "chunks":
            connector = ChunkConnector(store or KVStore(None))
        elif store is not None:
            connector = StoreConnector(store)
        options.setdefault("exact_only", reuse != "prefix")
        self._connector = connector
        self.engine = Engine(llm, connector=connector, **options)

    @overload
    def warm(self, prompt: str | Sequence[int]) -> Generation: ...

    @overload
    def warm(self, prompt: list[str]) -> list[Generation]: ...

    def warm(self, prompt: str | Sequence[int] | list[str]) -> Generation | list[Generation]:
        """Evaluate a prompt and keep its KV for prompts that begin with it.

        Args:
            prompt: a text, token ids, or a list of documents. Each document is evaluated after the model's
                BOS and stored, for prompts that contain it anywhere (reuse="chunks").

        Raises:
            ValueError: a prompt or document is empty or too long; then none is evaluated.
        """
        documents = _documents(prompt)
        if documents is None:
            return self._evaluate(
                self.engine.tokenizer.prompt(cast("str | Sequence[int]", prompt)), keep=True
            )
        if not all(documents):
            raise ValueError("prompt: there is an empty document: leave it out")
        prompts = [self.engine.tokenizer.prompt(text) for text in documents]
        for tokens in prompts:
            self.engine.check_prompt(len(tokens))
        done = [self._evaluate(tokens, keep=False) for tokens in prompts]  # so that each has its own window
        if self._connector is not None:
            self._connector.flush()
        return done

    def _evaluate(self, tokens: Sequence[int], keep: bool) -> Generation:
        called = time.perf_counter()
        job = Job(Request(prompt=tokens, max_tokens=0, keep=keep))
        answer = Answer(self.engine, job)
        self.engine.submit_jobs([job])
        return _generation(answer, called)

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Answer a prompt: a text, token ids, or the messages of a chat.

        Args:
            **options: of `Engine.submit`: max_tokens, stop, temperature, seed, ...

        Raises:
            ValueError: the prompt is empty or too long, or an option is wrong.
        """
        called = time.perf_counter()
        return _generation(self.engine.submit(prompt, **options), called)

    def generate_batch(self, prompts: Sequence[Prompt], **options: Any) -> list[Generation]:
        """Answer prompts at the same time; a beginning that they share is evaluated once.

        Raises:
            ValueError: as in `generate`; then no prompt is answered.
        """
        called = time.perf_counter()
        answers: list[Answer] = []
        try:
            for prompt in prompts:
                answers.append(self.engine.submit(prompt, **options))
            return [_generation(answer, called) for answer in answers]
        except BaseException:
            for answer in answers:
                answer.cancel()
            raise

    def close(self) -> None:
        """Wait until all KV is stored. The `Llama` stays open."""
        self.engine.close()

    def __enter__(self) -> PromptCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _documents(prompt: str | Sequence[int] | list[str]) -> list[str] | None:
    if isinstance(prompt, str):
        return None
    texts = [text for text in prompt if isinstance(text, str)]
    return texts or None


def _generation(answer: Answer, called: float) -> Generation:
    done, job = answer.result(), answer.job
    end = job.t_end or time.perf_counter()
    return Generation(
        text=done.text,
        tokens=tuple(job.tokens[job.n_prompt :]),
        finish_reason=done.reason,
        ttft_ms=1000 * ((job.t_first or end) - called),
        total_ms=1000 * (end - called),
        prompt_tokens=job.n_given,
        evaluated=job.n_evaluated,
        tier=job.cached_tier,
        exact=job.exact,
        approximate=job.n_approximate,
    )
