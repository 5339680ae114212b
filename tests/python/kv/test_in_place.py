"""Both tiers read as they lie by llama.cpp's own attention on a Vulkan device (docs/platforms.md).

The same rows read through the merged view on the same device are what answers are compared with;
tests/cpp/llama/test_in_place.cpp compares the attention alone with double precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from mixedkv.native.memory import gpu_kinds
from support.cache.harness import Ctx, InitError, Mixed, Model, prompt, rel_rms
from support.cache.hidden import hidden

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(gpu_kinds() != {"Vulkan"}, reason="no Vulkan device, or no Vulkan in this build"),
]

ALL = 99
KV = Mixed(threshold=40, group=8, sinks=4)
F16 = KV.with_(k="f16", v="f16")  # has no steps that rounding could move an element over
N = 180
MERGED = ("deepseek2",)  # V is a part of K
CLOSE = 5e-3  # F16 products add up in another order

Open = Callable[..., Ctx]


@pytest.fixture(scope="module")
def models(zoo_path: Callable[[str], Path]) -> Iterator[Callable[[str, int], Model]]:
    opened: dict[tuple[str, int], Model] = {}

    def open_(name: str, n_gpu_layers: int) -> Model:
        key = (name, n_gpu_layers)
        if key not in opened:
            opened[key] = Model(zoo_path(name), n_gpu_layers=n_gpu_layers)
        return opened[key]

    yield open_
    for model in opened.values():
        model.close()


@pytest.fixture
def open_on(models: Callable[[str, int], Model]) -> Iterator[Open]:
    """open_on(name, kv, n_gpu_layers=ALL, **options): a context that closes with the test."""
    with ExitStack() as stack:
        stack.enter_context(hidden(in_place="1"))

        def open_(name: str, kv: Mixed = KV, n_gpu_layers: int = ALL, **options: object) -> Ctx:
            return stack.enter_context(Ctx(models(name, n_gpu_layers), kv, **options))  # type: ignore[arg-type]

        yield open_


def both(open_on: Open, name: str, kv: Mixed = KV, **options: object) -> tuple[Ctx, Ctx]:
    """Two contexts on the device: one reads in place, one through the view."""
    pair = open_on(name, kv, **options), open_on(name, kv.with_(attention="merged"), **options)
    assert all(layer["in_place"] for layer in pair[0].layers())
    assert not any(layer["in_place"] or layer["fused"] for layer in pair[1].layers())
    return pair


def assert_same_answers(pair: tuple[Ctx, Ctx], decode: Callable[[Ctx], list[np.ndarray]]) -> None:
    mine, view = (np.concatenate(decode(ctx)) for ctx in pair)
    assert np.isfinite(mine).all()
    assert rel_rms(mine, view) < CLOSE


@pytest.mark.parametrize(("name", "cold"), [("llama-64", "q4_0"), ("gemma2", "q8_0")])
def test_answers_are_those_of_the_merged_view(open_on: Open, name: str, cold: str) -> None:
    """Prompts in micro-batches, of several tokens and of one, from the same stored rows."""
    pair = both(open_on, name, KV.with_(k=cold, v=cold))
    tokens = prompt(N + 40)
    pair[0].decode(tokens[:N])
    assert pair[1].load(pair[0].save())
    # a query rotates no row to another step: what is stored from here on is what both have computed
    assert_same_answers(pair, lambda ctx: [ctx.decode(tokens[N : N + 1])])
    assert_same_answers(pair, lambda ctx: [ctx.decode(tokens[N + 1 : N + 7])])
    assert_same_answers(pair, lambda ctx: [ctx.decode(tokens[N + 7 :])])


@pytest.mark.parametrize(("name", "unified"), [("llama-64", True), ("gpt-oss", False)])
def test_several_sequences(open_on: Open, name: str, unified: bool) -> None:
    pair = both(open_on, name, F16, n_seq_max=3, unified=unified, n_ctx=768)
    for seq in range(3):
        tokens = prompt(60 + 30 * seq, seed=seq)
        assert_same_answers(pair, lambda ctx, tokens=tokens, seq=seq: [ctx.decode(tokens, 0, seq)])
    for step in range(3):
        positions = [60 + step, 90 + step, 120 + step]
        assert_same_answers(
            pair, lambda ctx, positions=positions: [ctx.decode([5, 6, 7], positions, [[0], [1], [2]])]
        )
    for ctx in pair:
        ctx.rm(1)
        ctx.cp(2, 1)
    assert_same_answers(pair, lambda ctx: [ctx.decode([8, 9], [123, 123], [[1], [2]])])


def test_a_shift_and_tokens_taken_back(open_on: Open) -> None:
    pair = both(open_on, "llama-64", F16)
    for ctx in pair:
        ctx.decode(prompt(150))
        ctx.rm(0, 140)
        ctx.context_shift(4, 40)
    assert_same_answers(pair, lambda ctx: [ctx.decode(prompt(12, seed=3)), ctx.decode([7])])


def test_states_and_rows_come_back_with_their_bits(open_on: Open) -> None:
    ctx = open_on("llama-64", n_seq_max=2, unified=True)
    ctx.decode(prompt(100))
    state, rows = ctx.save_seq(0), ctx.export(0)
    ctx.cp(0, 1)
    want = ctx.decode([7, 8])
    assert np.array_equal(ctx.decode([7, 8], 100, 1), want)
    ctx.clear()
    assert ctx.load_seq(state)
    assert np.array_equal(ctx.decode([7, 8]), want)
    ctx.clear()
    ctx.put(rows)
    assert np.array_equal(ctx.decode([7, 8]), want)


def test_some_layers_on_the_device(open_on: Open) -> None:
    """One of two layers is the CPU's: both read the one mask."""
    ctx = open_on("llama-64", F16, n_gpu_layers=2)
    assert [(layer["fused"], layer["in_place"]) for layer in ctx.layers()] == [(True, False), (False, True)]
    tokens = prompt(N)
    assert rel_rms(ctx.decode(tokens), open_on("llama-64", F16, n_gpu_layers=0).decode(tokens)) < CLOSE


def test_it_takes_no_view(open_on: Open) -> None:
    mine, view = both(open_on, "llama-64", n_ctx=4096)
    assert mine.stats()["bytes_view"] == 0
    assert view.stats()["bytes_view"] > 0
    assert mine.stats()["bytes_compute"] < view.stats()["bytes_compute"]


def test_it_is_off(models: Callable[[str, int], Model]) -> None:
    """Until its fault is found: docs/decisions/127."""
    with Ctx(models("llama-64", ALL), KV) as ctx:
        assert not any(layer["in_place"] or layer["fused"] for layer in ctx.layers())


@pytest.mark.parametrize("name", MERGED)
def test_other_layers_stay_merged(open_on: Open, name: str) -> None:
    assert not any(layer["in_place"] or layer["fused"] for layer in open_on(name).layers())
    with pytest.raises(InitError, match="use attention 'merged'"):
        open_on(name, KV.with_(attention="fused"))
