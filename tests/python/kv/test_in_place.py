"""Both tiers read as they lie by llama.cpp's own attention on a Vulkan device (docs/platforms.md).

The same rows read through the merged view on the same device are what answers are compared with;
tests/cpp/llama/test_in_place.cpp compares the attention alone with double precision.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.bundled.corpus import make_recall
from mixedkv.cli import main
from mixedkv.engine import Engine
from mixedkv.native.memory import gpu_kinds
from support.cache.harness import Ctx, InitError, Mixed, Model, prompt, rel_rms
from support.cache.hidden import hidden
from support.engine.conversations import open_llama

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


@pytest.mark.parametrize(
    ("name", "cold"),
    [
        ("llama-64", "q4_0"),
        ("llama-96", "q8_0"),
        ("llama-128", "q5_0"),
        ("qwen3", "q8_0"),  # a norm of K
        ("gemma2", "q8_0"),  # soft caps, layers with a sliding window
        ("gemma4", "q4_0"),  # heads of two sizes
        ("gpt-oss", "q4_0"),  # sinks
        ("refact", "q5_0"),  # ALiBi
        ("lfm2", "q4_0"),  # recurrent layers
    ],
)
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


def steps(ctx: Ctx, il: int, which: str) -> tuple[np.ndarray, np.ndarray]:
    """Elements of the cold rows of Q4_0 in blocks of 32, and how large a step of each block is."""
    rows, _, hot = ctx.rows(il, which)
    blocks = rows[~hot.astype(bool)].reshape(-1, 32)
    return blocks, np.abs(blocks).max(axis=1, keepdims=True) / 8  # the largest element is eight steps


def test_what_differs_with_quantised_rows_is_steps(open_on: Open) -> None:
    """Rows that both have computed differ by whole steps of Q4_0 in a few elements, and attention to the same
    rows does not differ.
    """
    pair = both(open_on, "llama-64")
    tokens = prompt(N + 1)
    answers = [ctx.decode(tokens[:N]) for ctx in pair]
    for il, which in ((il, which) for il in range(2) for which in "kv"):
        (mine, step), (view, other) = (steps(ctx, il, which) for ctx in pair)
        moved = np.abs(mine - view) / np.maximum(step, other)
        assert moved.max() < 1.1
        if il == 0:  # nothing attends before these are stored
            assert moved.max() == 0
        else:
            assert 0 < np.mean(moved > 0.5) < 0.02
    assert rel_rms(*answers) > CLOSE / 5
    assert pair[1].load(pair[0].save())
    assert_same_answers(pair, lambda ctx: [ctx.decode(tokens[N:])])


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


def test_eight_sequences_of_an_engine() -> None:
    recalls = [make_recall(seed, 8) for seed in range(8)]
    texts: dict[str, list[str]] = {}
    shape = {"n_ctx": 2048, "n_seq_max": 10, "kv_unified": True, "n_gpu_layers": -1}
    for kv in ("mixed:threshold=32,group=16", "mixed:threshold=32,group=16,attention=merged"):
        with hidden(in_place="1"), open_llama(kv, **shape) as llm:
            expected = "merged" if "merged" in kv else "in place (vulkan)"
            assert {layer.attention for layer in llm.kv.layers} == {expected}
            with Engine(llm, parallel=8) as engine:
                answers = [engine.submit(recall.prompt, max_tokens=12, temperature=0) for recall in recalls]
                texts[expected] = [answer.text for answer in answers]
    assert texts["in place (vulkan)"] == texts["merged"]
    assert sum(text == recall.fact.answer for text, recall in zip(texts["merged"], recalls, strict=True)) >= 6


def test_a_budget_needs_no_room_for_a_view(capsys: pytest.CaptureFixture[str]) -> None:
    settings, views = [], []
    for in_place in "01":
        with hidden(in_place=in_place):
            options = {"n_ctx": 8192, "n_gpu_layers": -1, "verbose": False}
            with Llama(model_path(), kv=f"mixed:budget={17 << 20}", **options) as llm:
                stats = llm.kv.stats()
                assert stats.bytes_total <= 17 << 20
                settings.append((str(llm.kv.config), stats.bytes_view))
            assert main(["info", "-m", str(model_path()), "--n-ctx", "8192", "--json"]) == 0
            views.append(json.loads(capsys.readouterr().out)["caches"])
    (merged, view), (in_place, none) = settings
    assert view > 0 == none
    assert merged != in_place
    assert max(cache["bytes_view"] for cache in views[0]) > 0
    assert max(cache["bytes_view"] for cache in views[1]) == 0


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
