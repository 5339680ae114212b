"""Embeddings of several tenants take turns by tokens: the embedder alone, on a context that only counts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mixedkv.engine.embed.embedder import Embedder
from mixedkv.engine.embed.embedding_context import InputSpan
from mixedkv.engine.schedule.contract import Observer, StepPlan
from mixedkv.errors import EngineError, QueueFullError
from mixedkv.work.turns import Limits, TenantLimits, unlimited

pytestmark = pytest.mark.full

N_EMBD = 2


class Engine:
    """One that has nothing else to do."""

    observer, alive, closing_error = Observer(), True, None
    n_queued = n_running = n_steps = 0
    last_step, last_step_seconds = StepPlan(), 0.0

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
        return future


class Context:
    """Counts tokens by tenant, which the token ids name."""

    n_embd, n_slice, n_seq, n_ctx, can_split = N_EMBD, 32, 8, 64, True

    def __init__(self) -> None:
        self.tokens: Counter[int] = Counter()

    def evaluate(self, pieces: Any) -> list[Any]:
        for piece in pieces:
            self.tokens[piece.tokens[0]] += len(piece.tokens)
        return [np.ones(N_EMBD, np.float32) for _ in pieces]

    def join(self, vectors: Any, sizes: Any) -> Any:
        return vectors[0]

    def clear(self) -> None: ...


def run(body: Callable[[Embedder, Context], Any], limits: Limits = unlimited) -> Any:
    async def main() -> Any:
        context: Any = Context()
        engine: Any = Engine()
        return await body(Embedder(engine, context, max_requests=64, slowdown=2.0, limits=limits), context)

    return asyncio.run(main())


def inputs(tenant: int, n: int, length: int = 16) -> list[list[int]]:
    return [[tenant] * length for _ in range(n)]


def test_many_requests_of_one_tenant_do_not_hold_up_another() -> None:
    async def body(embedder: Embedder, context: Context) -> None:
        long = [asyncio.create_task(embedder.embed(inputs(1, 400), "anna")) for _ in range(30)]
        await asyncio.sleep(0)
        await asyncio.create_task(embedder.embed(inputs(2, 50), "ben"))
        assert context.tokens[2] == 800
        assert context.tokens[1] <= 800 + 2 * Context.n_slice
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)

    run(body)


@pytest.mark.parametrize("length", [5, 16, 60])
def test_weights(length: int) -> None:
    limits = {"anna": TenantLimits(weight=1), "ben": TenantLimits(weight=3)}

    async def body(embedder: Embedder, context: Context) -> None:
        tasks = [
            asyncio.create_task(embedder.embed(inputs(no, 4000, length), name))
            for no, name in ((1, "anna"), (2, "ben"))
        ]
        while sum(context.tokens.values()) < 20_000:
            await asyncio.sleep(0)
        ratio = context.tokens[2] / context.tokens[1]
        assert 2.7 < ratio < 3.3
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(body, limits.__getitem__)


def test_who_had_nothing_to_do_is_owed_nothing() -> None:
    async def body(embedder: Embedder, context: Context) -> None:
        first = asyncio.create_task(embedder.embed(inputs(1, 4000), "anna"))
        while context.tokens[1] < 10_000:
            await asyncio.sleep(0)
        second = asyncio.create_task(embedder.embed(inputs(2, 4000), "ben"))
        before = context.tokens[1]
        while context.tokens[2] < 3000:
            await asyncio.sleep(0)
        assert context.tokens[1] - before > 2500
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)

    run(body)


def test_each_tenant_has_room_of_its_own() -> None:
    limits = {"anna": TenantLimits(queued=2, running=1), "ben": TenantLimits()}

    async def body(embedder: Embedder, context: Context) -> None:
        tasks = [asyncio.create_task(embedder.embed(inputs(1, 400), "anna")) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="3 requests"):
            embedder.check_room("anna")
        embedder.check_room("ben")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(body, limits.__getitem__)


class Slices(Context):
    """Of a token t it gives (t, 1), and fails on 13."""

    def __init__(self, n_slice: int = 8, on_token: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.n_slice, self.on_token = n_slice, on_token
        self.slices: list[list[InputSpan]] = []

    def evaluate(self, pieces: list[InputSpan]) -> Any:
        self.slices.append(pieces)
        for _ in range(sum(len(piece.tokens) for piece in pieces)):
            self.on_token()
        if any(13 in piece.tokens for piece in pieces):
            raise EngineError("13")
        return np.array([[np.mean(piece.tokens), 1] for piece in pieces])

    def join(self, vectors: Any, sizes: Any) -> Any:
        return np.average(vectors, axis=0, weights=sizes)


def embed_all(*requests: list[list[int]], context: Slices | None = None) -> tuple[Slices, list[Any]]:
    context = context or Slices()

    async def main() -> list[Any]:
        embedder = Embedder(Engine(), context, max_requests=9, slowdown=2.0)  # type: ignore[arg-type]
        return await asyncio.gather(*(embedder.embed(each) for each in requests), return_exceptions=True)

    return context, asyncio.run(main())


def test_requests_take_turns_and_only_one_input_is_unfinished() -> None:
    long = [[i] * 5 for i in range(20, 30)]
    context, results = embed_all(long, [[7] * 3], [[8]])
    assert results[0].tolist() == [[i, 1] for i in range(20, 30)]
    assert (results[1].tolist(), results[2].tolist()) == ([[7, 1]], [[8, 1]])
    assert [piece.tokens[0] for piece in context.slices[0]] == [20, 7]  # the second request after one input
    for pieces in context.slices:
        assert sum(len(piece.tokens) for piece in pieces) <= context.n_slice
        assert all(piece.first == 0 for piece in pieces[1:])
        assert all(piece.ends for piece in pieces[:-1])


def test_a_slice_that_fails_fails_those_in_it() -> None:
    _, results = embed_all([[1] * 8, [2] * 8], [[13] * 8], [[3] * 8])
    assert isinstance(results[1], EngineError)
    assert (results[0].tolist(), results[2].tolist()) == ([[1, 1], [2, 1]], [[3, 1]])


@pytest.mark.nightly
def test_slices_are_short_on_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second, when nothing runs: whoever comes waits for it."""
    clock = [0.0]

    def take_long() -> None:
        clock[0] += 0.02

    monkeypatch.setattr("mixedkv.engine.embed.embedder.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    slow = Slices(n_slice=512, on_token=take_long)
    context, (vectors,) = embed_all([[20] * 80], context=slow)
    assert vectors.tolist() == [[20, 1]]
    sizes = [sum(len(piece.tokens) for piece in pieces) for pieces in context.slices]
    assert sizes[0] <= 32  # nothing is known yet
    assert 0.3 < max(sizes[1:]) * 0.02 <= 0.5


@pytest.mark.parametrize("n_running", [0, 1, 8])
def test_a_slice_beside_prompts_takes_a_share(monkeypatch: pytest.MonkeyPatch, n_running: int) -> None:
    """A slice takes as long as each of the prompts had of the step before, and half a second alone."""

    async def body(embedder: Embedder, context: Context) -> list[int]:
        embedder._seconds = 0.01  # a token
        return [embedder._budget()]

    monkeypatch.setattr(Engine, "n_running", n_running)
    monkeypatch.setattr(Engine, "last_step_seconds", 0.16)
    assert run(body) == [{0: 32, 1: 16, 8: 2}[n_running]]
