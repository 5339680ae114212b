"""Requests for vectors, evaluated in slices between the engine's steps."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from mixedkv.engine.embed.embedding_context import EmbeddingContext, InputSpan, Vectors, embedding_bytes
from mixedkv.engine.engine import Engine
from mixedkv.engine.schedule.pacing import SLOWDOWN, Pace
from mixedkv.errors import ClosedError, ModelChangedError, NotFiniteError, QueueFullError
from mixedkv.limits import MAX_SEQUENCES
from mixedkv.model.gguf_file import ModelFile
from mixedkv.work.turns import Limits, Service, unlimited

log = logging.getLogger("mixedkv.engine")

_FIRST = 16  # tokens in the first slice
_LONGEST = 0.5  # seconds that a slice may take on an idle engine, as a new job waits for it
_YIELD_SECONDS = 0.001


class _Input:
    """One text of a request, and the vectors of its spans so far."""

    def __init__(self, request: _Request, index: int, tokens: Sequence[int]) -> None:
        self.request, self.index, self.tokens = request, index, tokens
        self.vectors: list[Vectors] = []
        self.sizes: list[int] = []

    def next_span(self, n_max: int) -> InputSpan:
        first = sum(self.sizes)
        tokens = self.tokens[first : first + n_max]
        self.sizes.append(len(tokens))
        return InputSpan(tokens, first, first + len(tokens) == len(self.tokens))


class _Request:
    def __init__(self, inputs: Sequence[Sequence[int]], n_embd: int, tenant: str) -> None:
        self.tenant = tenant
        self.inputs = deque(_Input(self, i, tokens) for i, tokens in enumerate(inputs))  # not begun
        self.vectors = np.empty((len(inputs), n_embd), np.float32)
        self.n_left = len(inputs)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Embedder:
    """Takes requests on the event loop and evaluates them on the engine's thread, one slice per call.

    A slice takes inputs of the tenant with the fewest evaluated tokens for its weight, and from its requests
    in turn, so that a short one does not wait for a long list. There is one call at a time, and the engine
    makes a step between two calls.

    Args:
        max_requests: maximum number of running and waiting requests, for a tenant without limits of its own.
        slowdown: how much longer the time between two tokens of an answer may get.
        limits: of each tenant.
    """

    def __init__(
        self,
        engine: Engine,
        context: EmbeddingContext,
        *,
        max_requests: int,
        slowdown: float = SLOWDOWN,
        limits: Limits = unlimited,
    ) -> None:
        self.context = context
        self._engine, self._observer, self._max_requests = engine, engine.observer, max_requests
        self._pace = Pace(context.n_slice + MAX_SEQUENCES, slowdown)
        self._here: set[_Request] = set()
        self._limits = limits
        self._requests: dict[str, deque[_Request]] = {}  # with inputs not begun, by tenant; none empty
        self._service = Service(limits)  # evaluated tokens by tenant, while several have requests
        self._begun: _Input | None = None  # its rows are in the context
        self._pump: asyncio.Task[None] | None = None
        self._closing = False
        self._seconds = 0.0  # seconds that a token of a slice takes
        self._n_steps = 0  # the engine's before the last slice, which had
        self._n_tokens, self._slice_seconds = 0, 0.0

    @classmethod
    def open(
        cls,
        engine: Engine,
        file: ModelFile,
        *,
        n_ctx: int,
        n_batch: int,
        max_requests: int,
        limits: Limits = unlimited,
    ) -> Embedder:
        """Return an embedder with a context of its own beside the engine's.

        Args:
            file, n_ctx, n_batch: as `EmbeddingContext` takes them.

        Raises:
            ValueError: the model gives no vectors, is not made for this n_ctx, or there is no memory.
        """
        context = EmbeddingContext(engine.llm, file, n_ctx=n_ctx, n_batch=n_batch)
        return cls(engine, context, max_requests=max_requests, limits=limits)

    context_bytes = staticmethod(embedding_bytes)

    # --- the event loop ---

    def check_room(self, tenant: str = "") -> None:
        """Check that there is room for another request.

        Raises:
            QueueFullError: the tenant has as many requests as it may.
            ClosedError: the server is shutting down.
        """
        if self._closing:
            raise ClosedError("the engine is shutting down")
        if (error := self._engine.closing_error) is not None:
            raise error
        n, limits = sum(request.tenant == tenant for request in self._here), self._limits(tenant)
        most = self._max_requests
        if limits.queued is not None:
            most = max(1, limits.queued + (limits.running or 0))
        if n >= most:
            limit = "parallel + max_queue" if limits.queued is None else "running + queued"
            raise QueueFullError(
                f"{n} requests for embeddings are here already, and the limit is {limit}={most}"
            )

    async def embed(self, inputs: Sequence[Sequence[int]], tenant: str = "") -> Vectors:
        """Return vectors of length 1, [len(inputs), n_embd]. After a cancellation no further input is begun.

        Args:
            inputs: token ids, each of 1 to `context.n_ctx`.
            tenant: whose they are.

        Raises:
            QueueFullError, ClosedError: as `check_room`.
            EngineError: llama.cpp failed.
        """
        self.check_room(tenant)
        request = _Request(inputs, self.context.n_embd, tenant)
        if tenant not in self._requests:
            self._service.join(tenant, self._requests)
            self._requests[tenant] = deque()
        self._requests[tenant].append(request)
        self._here.add(request)
        self._observer.embedding_requests(1)
        if self._pump is None:
            self._pump = asyncio.get_running_loop().create_task(self._run())
        began, outcome = time.perf_counter(), "abort"
        try:
            await request.done
            outcome = "stop"
        except Exception:
            outcome = "error"
            raise
        finally:
            self._drop(request)
            self._here.discard(request)
            self._observer.embedding_requests(-1)
            self._observer.embedded(outcome, time.perf_counter() - began)
        return request.vectors

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait for the others; cancel those left after `seconds`.

        Return whether all finished.
        """
        self._closing = True
        end = time.monotonic() + seconds
        while self._here and time.monotonic() < end:
            await asyncio.sleep(0.01)
        finished = not self._here
        self._fail_all(ClosedError("the engine is shutting down"))
        if self._pump is not None:
            await asyncio.wait({self._pump})  # a slice at most
        return finished

    def _fail_all(self, error: Exception) -> None:
        for request in self._here:
            request.fail(error)

    def _drop(self, request: _Request) -> None:
        """Stop evaluating the inputs of a request."""
        if request in (queue := self._requests.get(request.tenant, ())):
            queue.remove(request)  # type: ignore[union-attr]
            self._forget_if_empty(request.tenant)
        if self._begun is not None and self._begun.request is request:
            self._begun = None

    async def _run(self) -> None:
        try:
            while self._begun is not None or self._requests:
                if self._engine.n_queued and not self._engine.n_running:
                    await asyncio.sleep(_YIELD_SECONDS)  # an idle engine runs calls before it starts jobs
                await self._slice()
        except Exception as error:
            log.exception("embeddings fail: this is a bug, please report it")
            self._fail_all(error)
        finally:
            self._pump = None
        if self._engine.alive:  # a request that was given up may have left rows
            self._engine.call(self.context.clear)

    async def _slice(self) -> None:
        parts = self._compose(self._budget())
        spans = [span for _, span in parts]
        call = self._engine.call(lambda: self._evaluate(spans))
        try:
            vectors = await asyncio.wrap_future(call)
        except Exception as error:
            if not isinstance(error, ClosedError):
                log.exception("inputs could not be embedded")
            for item, _ in parts:
                self._drop(item.request)
                item.request.fail(error)
            return
        for (item, span), vector in zip(parts, vectors, strict=True):
            self._take(item, span, vector)

    def _budget(self) -> int:
        """Return how many tokens the next slice may have; none in some steps of running answers. Beside
        prompts a tenant's slice takes as long as one of these had of the step before.
        """
        n_slice, seconds, n_running = self.context.n_slice, _LONGEST, self._engine.n_running
        if n_running and (n_streams := self._engine.last_step.n_streams):
            return min(n_slice, self._pace.budget(n_streams))
        if n_running:
            share = self._engine.last_step_seconds * max(1, len(self._requests)) / n_running
            seconds = min(seconds, share)
        return max(1, min(n_slice, int(seconds / self._seconds) if self._seconds else _FIRST))

    def _compose(self, budget: int) -> list[tuple[_Input, InputSpan]]:
        """Choose the spans of a slice: inputs that were begun come first, then those of all requests in
        turn.
        """
        parts: list[tuple[_Input, InputSpan]] = []
        while budget > 0 and len(parts) < self.context.n_seq:
            item = self._begun or self._next_input()
            if item is None:
                break
            if not self.context.can_split and len(item.tokens) > budget:
                if parts:
                    self._put_back(item)
                    break
                budget = len(item.tokens)
            span = item.next_span(budget)
            self._begun = None if span.ends else item
            parts.append((item, span))
            self._service.add(item.request.tenant, len(span.tokens))
            budget -= len(span.tokens)
        return parts

    def _next_input(self) -> _Input | None:
        if not self._requests:
            self._service.clear()  # nobody waits any more
            return None
        tenant = min(self._requests, key=self._service.of)
        queue = self._requests[tenant]
        request = queue.popleft()
        item = request.inputs.popleft()
        if request.inputs:
            queue.append(request)
        self._forget_if_empty(tenant)
        return item

    def _put_back(self, item: _Input) -> None:
        """Put an input back, to begin the next slice with."""
        request = item.request
        request.inputs.appendleft(item)
        queue = self._requests.setdefault(request.tenant, deque())
        if request not in queue:
            queue.appendleft(request)

    def _forget_if_empty(self, tenant: str) -> None:
        if not self._requests[tenant]:
            del self._requests[tenant]

    def _take(self, item: _Input, span: InputSpan, vector: Vectors) -> None:
        item.vectors.append(vector)
        self._observer.embedded_span(len(span.tokens), span.ends)
        if not span.ends:
            return
        request = item.request
        request.vectors[item.index] = self.context.join(item.vectors, item.sizes)
        request.n_left -= 1
        if not np.isfinite(request.vectors[item.index]).all():
            request.fail(NotFiniteError("the model's vectors of this input"))
        elif request.n_left == 0 and not request.done.done():
            request.done.set_result(None)

    # --- the engine's thread ---

    def _evaluate(self, spans: Sequence[InputSpan]) -> Iterable[Vectors]:
        """Evaluate the spans of a slice, or without spans wait for a step."""
        self._watch()
        self._n_steps = self._engine.n_steps
        self._n_tokens = n = sum(len(span.tokens) for span in spans)
        self._slice_seconds = 0.0
        if not spans:
            return ()
        if isinstance(error := self._engine.closing_error, ModelChangedError):
            raise error
        began = time.perf_counter()
        vectors = self.context.evaluate(spans)
        self._slice_seconds = seconds = time.perf_counter() - began
        self._observer.embedding_slice(seconds)
        if n >= min(_FIRST, self.context.n_slice):
            self._seconds = seconds / n
        return vectors

    def _watch(self) -> None:
        """Learn from the engine's last step and the slice before it."""
        n_steps = self._engine.n_steps - self._n_steps
        step, seconds = self._engine.last_step, self._engine.last_step_seconds
        if n_steps and step.n_streams and not step.n_prompt:
            n_tokens, more = (self._n_tokens, self._slice_seconds) if n_steps == 1 else (0, 0.0)
            self._pace.observe(step.n_streams, n_tokens, seconds + more)
