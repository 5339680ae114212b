"""Answers prompts and chats, one by one or together, and evaluates only the part of each that is new."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from types import TracebackType
from typing import Any, cast, get_args, overload

import numpy as np
import numpy.typing as npt

from mixedkv.chunks.chunk_reuse import ChunkChoice, Repair
from mixedkv.chunks.gate import Deviation, compare, last_logits
from mixedkv.chunks.passages import ChunkOptions
from mixedkv.chunks.repair import Method
from mixedkv.engine.answer import Answer
from mixedkv.engine.chat.tokenizer import Prompt, Tokenizer
from mixedkv.engine.chat_call import Message, chat_of, submit_options
from mixedkv.engine.chat_stream import ChatStream
from mixedkv.engine.connectors.chunk_connector import ChunkConnector
from mixedkv.engine.connectors.store_connector import StoreConnector
from mixedkv.engine.engine import Engine
from mixedkv.engine.generation import Generation, generation_of
from mixedkv.engine.jobs.job import Job
from mixedkv.engine.schedule.request import Request
from mixedkv.errors import ContextLengthError, UnsupportedModelError
from mixedkv.ids import check_id, check_session_id, check_tenant, new_id
from mixedkv.limits import check_int
from mixedkv.llama import Llama
from mixedkv.native.chat_formats import chosen_format
from mixedkv.prefix.sequences import Reuse
from mixedkv.prompts.overflow import Overflow
from mixedkv.prompts.part import Insert
from mixedkv.store import Identity, KVStore
from mixedkv.tokens import Tokens, as_tokens

log = logging.getLogger("mixedkv.engine")

_OF_CHUNKS = {each.name for each in fields(ChunkOptions)}


class PromptCache:
    """Answers prompts and chats on one `Llama`, with the KV of what they have in common.

    With a plain `Llama` it evaluates on the thread that calls, one prompt at a time, in sequence 0. Others
    may use the `Llama` between two answers; what they leave there is not gone on from. With a `Llama` of
    several sequences an engine's thread answers several prompts at a time, and has the `Llama` for itself.

    >>> llm = Llama("model.gguf", kv="mixed", n_ctx=8192)
    >>> with PromptCache(llm, KVStore("kv-folder")) as cache:
    ...     result = cache.chat(messages)
    ...     messages += [result.message, {"role": "user", "content": "And then?"}]
    ...     result = cache.chat(messages)  # evaluates the new message only

    >>> llm = Llama("model.gguf", kv="mixed", n_ctx=8192, n_seq_max=16, kv_unified=True)
    >>> with PromptCache(llm, KVStore("kv-folder")) as cache:
    ...     cache.warm(document)
    ...     answers = cache.generate_batch([document + question for question in questions])

    Messages are dictionaries in OpenAI's form. Each may have a `message_id`, as answers have: a name by which
    KV is found and forgotten. What is reused is decided by the tokens of the prompt: wrong ids and edited,
    moved or deleted messages cost time at most.

    Args:
        llm: left open when the cache is closed.
        store: keeps KV, also for the next process; closed with the cache. None keeps KV in the context only.
        reuse: "exact" uses only rows that equal an evaluation; "prefix" also a beginning whose recent rows
            are less precise, as after an edit in a mixed cache; "chunks" also passages of other prompts, see
            docs/passages.md; without a store they are kept in memory. An answer says if it is not `exact`.
        tenant: whose prompts these are; nobody else's KV is found.
        session: what stored KV goes away with, e.g. `CacheSessionMetadata.kv_cache_ref`.
        overflow: "slide" drops the middle of a chat that outgrows the context, see docs/chats.md; "refuse"
            takes no such prompt, and answers end at the context.
        threaded: answer on a thread of the engine's own; None: where the `Llama` has several sequences in one
            pool (kv_unified).
        **options: of `Engine`: parallel, speculation, ..., and with reuse="chunks" of `ChunkOptions`: repair,
            ratio, check, ...

    Raises:
        ValueError: as `Engine`, or a setting is wrong.
    """

    def __init__(
        self,
        llm: Llama,
        store: KVStore | None = None,
        *,
        reuse: Reuse = "exact",
        tenant: str = "",
        session: str | None = None,
        overflow: Overflow = "refuse",
        threaded: bool | None = None,
        **options: Any,
    ) -> None:
        self._tenant = check_tenant(tenant)
        self._session = None if session is None else check_session_id(session)
        if overflow not in get_args(Overflow):
            raise ValueError(f"overflow={overflow!r}: use one of {', '.join(get_args(Overflow))}")
        self._overflow: Overflow = overflow
        of_chunks = {name: options.pop(name) for name in _OF_CHUNKS & options.keys()}
        connector: StoreConnector | None = None
        if reuse == "chunks":
            connector = ChunkConnector(store or KVStore(None), **of_chunks)
        elif of_chunks:
            raise ValueError(f"{', '.join(sorted(of_chunks))}: of passages: give reuse='chunks' as well")
        elif store is not None:
            connector = StoreConnector(store)
        if threaded is None:
            threaded = llm.context_params.n_seq_max > 1 and llm.context_params.kv_unified
        options.setdefault("exact_only", reuse != "prefix")
        options.setdefault("tokenizer", Tokenizer(llm, chosen_format(llm)))
        self._connector, self._reuse = connector, reuse
        self._n_dropped = 0  # of the latest chat
        self.engine = Engine(llm, connector=connector, threaded=threaded, **options)

    @property
    def llm(self) -> Llama:
        """The `Llama` that answers."""
        return self.engine.llm

    # --- prompts ---

    @overload
    def warm(self, prompt: str | Sequence[int]) -> Generation: ...

    @overload
    def warm(self, prompt: list[str]) -> list[Generation]: ...

    @overload
    def warm(self, prompt: Sequence[Tokens]) -> list[Generation]: ...

    def warm(
        self, prompt: str | Sequence[int] | list[str] | Sequence[Tokens]
    ) -> Generation | list[Generation]:
        """Evaluate a prompt and keep its KV for prompts that begin with it.

        Args:
            prompt: a text, token ids, or a list of documents, texts or token ids. Each document is evaluated
                alone, a text after the model's BOS, and stored, for prompts that contain it anywhere
                (reuse="chunks").

        Raises:
            ValueError: a prompt or document is empty or too long; then none is evaluated.
        """
        documents = _documents(prompt)
        if documents is None:
            return self._evaluate(
                self.engine.tokenizer.prompt(cast("str | Sequence[int]", prompt)), keep=True
            )
        if not all(len(document) for document in documents):
            raise ContextLengthError("prompt: there is an empty document: leave it out")
        prompts = [self._tokens(document) for document in documents]
        for tokens in prompts:
            self.engine.check_prompt(len(tokens))
        done = [self._evaluate(tokens, keep=False) for tokens in prompts]  # so that each has its own window
        if self._connector is not None:
            self._connector.flush()
        return done

    def _evaluate(self, tokens: Tokens | Sequence[int], keep: bool) -> Generation:
        called = time.perf_counter()
        job = Job(Request(prompt=tokens, max_tokens=0, keep=keep, tenant=self._tenant, session=self._session))
        return self._run(job, called)

    def _run(self, job: Job, called: float) -> Generation:
        answer = Answer(self.engine, job)
        self.engine.submit_jobs([job])
        return self._whole(answer, called)

    def prefill(
        self,
        prompt: str | npt.ArrayLike,
        *,
        reuse: Reuse | None = None,
        method: Method | Repair | None = None,
        tenant: str | None = None,
    ) -> Generation:
        """Fill sequence 0 of a plain `Llama` with a prompt, of which nothing is stored. The `Llama` goes on
        from there: `llm.sample()`, `llm.generate(...)`. What it evaluates next belongs to the prompt.

        Args:
            prompt: text or token ids; text gets the model's BOS, and special tokens in it are parsed.
            reuse: which rows are reused; None is the cache's own.
            method: how seams of chunks are repaired, a `Method` or the name of a repair; None is the cache's.
            tenant: whose KV is reused; None is the cache's.

        Raises:
            ContextLengthError: the prompt is empty or does not fit the context.
            UnsupportedModelError: the method needs another cache.
            ValueError: `reuse` is unknown, a token is not of this model, the tenant's name is refused, or the
                engine has a thread, which has the `Llama` for itself.
        """
        called = time.perf_counter()
        turn = self.engine.callers_turn
        if turn is None:
            raise ValueError("prefill: an engine's thread has this Llama for itself: use threaded=False")
        how = None if method is None else method if isinstance(method, Method) else Method(repair=method)
        choice = None
        if how is not None:
            overlap = None if how.repair == "none" else how.overlap
            choice = ChunkChoice(repair=how.repair, ratio=how.ratio, overlap_k=overlap)
        request = Request(
            prompt=self._tokens(prompt),
            max_tokens=0,
            reuse=self._reuse if reuse is None else reuse,
            reuse_options=choice,
            tenant=self._tenant if tenant is None else check_tenant(tenant),
        )
        (job,) = self.engine.prepare([request])
        job.is_stored = False
        done = self._run(job, called)
        turn.hand_over(done.chunks.n_exact if done.chunks is not None else None)
        return done

    def _tokens(self, prompt: str | npt.ArrayLike) -> list[int]:
        if isinstance(prompt, str) and not prompt:
            raise ContextLengthError("the prompt is empty: give it a text, or token ids")
        text_or_tokens = prompt if isinstance(prompt, str) else as_tokens(prompt).tolist()
        return self.engine.tokenizer.prompt(text_or_tokens)

    def refresh(self) -> None:
        """Index what was stored since the last prompt, with reuse="chunks", so that the next one need not."""
        if isinstance(self._connector, ChunkConnector):
            self._connector.refresh(self._tenant)

    def check_pending(self) -> Deviation | None:
        """Evaluate one of the sampled prompts with chunks exactly, and compare; None if there is none. An
        engine with a thread does it by itself; without one, call it in idle time.
        """
        if self.engine.threaded or not isinstance(self._connector, ChunkConnector):
            return None
        gate = self._connector.gate
        if (waiting := gate.take()) is None:
            return None
        job = Job(Request(prompt=waiting.tokens, max_tokens=0, reuse=False, tenant=waiting.tenant))
        job.is_stored = False
        self._run(job, time.perf_counter())
        deviation = compare(last_logits(self.llm), waiting.logits)
        gate.note(deviation)
        return deviation

    def stats(self) -> dict[str, Any]:
        """Return counts and sizes of the store; with reuse="chunks" also of checks, as "chunks"."""
        return self.engine.connector_stats() or {}

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Answer a prompt: a text, token ids, or the messages of a chat.

        Args:
            **options: of `Engine.submit`: max_tokens, stop, temperature, seed, ...

        Raises:
            ValueError: the prompt has no token (an empty text of a model without BOS) or is too long, or an
                option is wrong.
        """
        called = time.perf_counter()
        return self._whole(self._submit(prompt, options), called)

    def generate_batch(self, prompts: Sequence[Prompt], **options: Any) -> list[Generation]:
        """Answer prompts at the same time; a beginning that they share is evaluated once. With a plain
        `Llama` they are answered one after the other.

        Raises:
            ValueError: as in `generate`; then no prompt is answered.
        """
        called = time.perf_counter()
        answers: list[Answer] = []
        try:
            for prompt in prompts:
                answers.append(self._submit(prompt, options))
            return [self._whole(answer, called) for answer in answers]
        except BaseException:
            for answer in answers:
                answer.cancel()
            raise

    def _submit(self, prompt: Prompt, options: dict[str, Any]) -> Answer:
        mine = {"tenant": self._tenant, "session": self._session, "overflow": self._overflow}
        return self.engine.submit(prompt, **{**mine, **options})

    def _whole(self, answer: Answer, called: float) -> Generation:
        try:
            done = answer.result()
        except BaseException:
            answer.cancel()
            self.engine.stop(answer.job)
            raise
        return generation_of(answer.job, done.text, done.reason, called, logprobs=done.logprobs)

    # --- chats ---

    def chat(
        self,
        messages: Sequence[Message],
        *,
        message_id: str | None = None,
        images: Sequence[Insert] = (),
        **options: Any,
    ) -> Generation:
        """Answer a chat, evaluating only what is new of it.

        Args:
            messages: from the first to the newest.
            message_id: the answer's; None makes one.
            images: of the messages, in order; each stands in its message as `prompts.part.MARK`.
            **options: of `create_chat_completion`, with its defaults: max_tokens, temperature, stop, tools,
                tool_choice, response_format, grammar, logit_bias, logprobs, ...; None for max_tokens is what
                the context has room for. More are fields of `Sampling`.

        Raises:
            ValueError: messages, an id or an option are wrong, or the prompt does not fit.
            TypeError: there is no such option.
            UnsupportedModelError: a `chat_handler` of llama-cpp-python answers the chats of this `Llama`.
        """
        answer = self.stream(messages, message_id=message_id, images=images, **options)
        for _ in answer:
            pass
        assert answer.result is not None
        return answer.result

    def stream(
        self,
        messages: Sequence[Message],
        *,
        message_id: str | None = None,
        images: Sequence[Insert] = (),
        **options: Any,
    ) -> ChatStream:
        """Answer as `chat` does, while it is generated: iterate for chunks as
        `create_chat_completion(stream=True)` yields them.

        The first chunk's delta has the `message_id`. After the last one `result` is there. Where the stream
        is closed before, what was computed up to then is kept.
        """
        called, llm = time.perf_counter(), self.engine.llm
        if llm.chat_handler is not None:
            raise UnsupportedModelError(
                f"a chat handler ({type(llm.chat_handler).__name__}) answers the chats of this Llama: use "
                f"llm.create_chat_completion, or a Llama without chat_handler; images go with `images`"
            )
        new = new_id("msg") if message_id is None else check_id("message_id", message_id)
        chat, named = chat_of(messages, options, images)
        named = [] if images else named  # where messages end is not known by their texts alone
        most = options.pop("max_tokens", None)
        most = None if most is None or check_int("max_tokens", most) <= 0 else most
        made = submit_options(llm, options)
        answer = self._submit(chat, {**made, "max_tokens": most, "message_id": new, "named": named})
        end = partial(self._end_chat, answer, [name for name, _ in named if name], called)
        return ChatStream(answer, new, llm.model_path, end)

    def _end_chat(
        self, answer: Answer, ids: list[str], called: float, message: dict[str, Any], reason: str, ended: bool
    ) -> Generation:
        job = answer.job
        if not ended:
            answer.cancel()
            self.engine.stop(job)
        self._note_dropped(job)
        return generation_of(
            job,
            message["content"],
            reason,
            called,
            message=message,
            matched=self._matched(ids, job),
            logprobs=answer.result().logprobs if ended else (),
        )

    def forget(self, message_id: str) -> bool:
        """Remove the KV of an answer from the context and the store, and all that builds on it; False if none
        is stored.
        """
        check_id("message_id", message_id)
        return self._connector is not None and self._connector.forget_message(self._tenant, message_id) > 0

    def _matched(self, ids: Sequence[str], job: Job) -> str | None:
        """Return the newest message whose stored end lies within what a prompt went on from; the store has
        compared tokens.
        """
        if not (ids and job.n_cached and self._connector is not None) or job.parts:
            return None
        store, tenant = self._connector.store, self._tenant
        tokens = job.prompt[: job.n_cached]
        match = store.find(Identity.of(self.engine.llm, tenant=tenant), tokens, remote=False)
        ends = {link.entry: link.end for link in match.links} if match is not None else {}
        for message_id in reversed(ids):
            infos = store.messages.entries(tenant, message_id)
            if any(info.n_tokens <= ends.get(info.entry, -1) for info in infos):
                return message_id
        return None

    def _note_dropped(self, job: Job) -> None:
        """Warn when more tokens of a chat have left the context than before."""
        before, self._n_dropped = min(self._n_dropped, job.n_dropped), job.n_dropped
        if job.dropped_tokens is not None and job.n_dropped > before:
            log.warning(
                "the context of %d tokens is full: tokens %d to %d of the chat are dropped",
                self.engine.n_ctx,
                job.dropped_tokens.begin + before,
                job.dropped_tokens.begin + job.n_dropped - 1,
            )

    # --- the end ---

    def close(self) -> None:
        """Wait until all KV is stored, and close the store. The `Llama` stays open."""
        self.engine.close()

    def __enter__(self) -> PromptCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _documents(prompt: Any) -> list[Any] | None:
    """Return the documents of a list; None for a single prompt."""
    if isinstance(prompt, str) or not len(prompt):
        return None
    return list(prompt) if isinstance(prompt[0], str) or np.ndim(prompt[0]) else None
