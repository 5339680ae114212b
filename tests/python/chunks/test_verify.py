"""`verify_correctness` finds what is wrong with rows: these plant it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.chunks import verify_correctness
from mixedkv.chunks.donors import DonorIndex
from mixedkv.chunks.repair import Method
from mixedkv.chunks.verify import RowErrors
from mixedkv.engine import PromptCache
from mixedkv.kv.block import KVBlock, LayerRows
from mixedkv.store import KVStore
from mixedkv.tokens import Tokens
from mixedkv_bench.harness.reuse_cases import CaseMaker
from support.engine.conversations import empty, open_llama

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def shared() -> Iterator[Llama]:
    with open_llama("mixed", n_ctx=1024) as llm:  # Q4_0 rows
        yield llm


@pytest.fixture
def prompt(llm: Llama, store: KVStore) -> Tokens:
    """A prompt whose documents are stored in another order."""

    def encode(text: str) -> list[int]:
        return llm.tokenize(text.encode(), add_bos=False, special=True) if text else []

    case = CaseMaker(encode, llm.tokenize(b""), 600).make("documents", "conversation", 3)
    llm.eval(case.stored[0].tolist())
    store.save(llm)
    empty(llm)
    return case.prompt


def check(llm: Llama, store: KVStore, prompt: Tokens) -> Any:
    (found,) = verify_correctness(
        PromptCache(llm, store, reuse="chunks", repair="none", check=0.0), [prompt], n_gen=4
    )
    assert found.reuse.chunks.donors
    return found


def plant(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let what donors give be changed."""
    read = DonorIndex.read

    def changed(self: DonorIndex, *place: Any) -> list[KVBlock] | None:
        blocks = read(self, *place)
        return None if blocks is None else [change(block) for block in blocks]

    monkeypatch.setattr(DonorIndex, "read", changed)


def with_layer(block: KVBlock, il: int, change: Any) -> KVBlock:
    def one(layer: LayerRows) -> LayerRows:
        return change(layer) if layer.il == il else layer

    groups = tuple(replace(group, layers=tuple(map(one, group.layers))) for group in block.groups)
    return replace(block, groups=groups)


def test_what_is_right_passes(llm: Llama, store: KVStore, prompt: Tokens) -> None:
    found = check(llm, store, prompt)
    assert found.ok, found.problem
    assert 0 < found.worst_row < 0.25
    assert 0 <= found.kld < 1
    assert found.first_diverging is None or 0 <= found.first_diverging < 4


def test_a_prompt_that_nothing_is_reused_for_passes(llm: Llama, store: KVStore) -> None:
    (check,) = verify_correctness(
        PromptCache(llm, store, reuse="chunks"), ["The road to the attic was full of fog. " * 9]
    )
    assert (check.reuse.approximate, check.damaged, check.problem) == (0, (), "")


@pytest.mark.nightly
@pytest.mark.needs("real model")
def test_context_is_not_damage(real_model_q4_1: Path) -> None:
    """On a real model another context changes rows by more than their size; they are sound all the same."""
    first = "The miller counted the planks that went by, and said that he had seen worse in his time. " * 4
    second = "Bread is made of flour, water and salt. The dough rests for a night in a cold room. " * 4
    with Llama(real_model_q4_1, kv="mixed", n_ctx=512, verbose=False) as llm, KVStore(None) as store:
        cache = PromptCache(llm, store, reuse="chunks", repair="none", check=0.0)
        cache.warm([first, second])
        (found,) = verify_correctness(cache, ["Two texts. " + second + first + "In short:"], n_gen=2)
        assert found.reuse.approximate > 32
        assert (found.problem, found.damaged) == ("", ())


@pytest.fixture(scope="module", params=["mixed", "mixed:cold=q8_0"])
def real(request: pytest.FixtureRequest, real_model_q4_1: Path) -> Iterator[tuple[PromptCache, list[str]]]:
    """A cache that repairs with a passage, and a prompt that holds it elsewhere."""
    first = "The miller counted the planks that went by, and said that he had seen worse in his time. " * 4
    second = "Bread is made of flour, water and salt. The dough rests for a night in a cold room. " * 4
    kv = request.param
    with Llama(real_model_q4_1, kv=kv, n_ctx=512, verbose=False) as llm, KVStore(None) as store:
        cache = PromptCache(llm, store, reuse="chunks", repair="query", check=0.0)
        cache.warm([first, second])
        yield cache, ["Two texts. " + second + first + "In short:"]


@pytest.mark.needs("real model")
@pytest.mark.nightly
def test_repaired_rows_are_not_damage(real: tuple[PromptCache, list[str]]) -> None:
    cache, prompts = real
    report = verify_correctness(cache, prompts, n_gen=2)
    (found,) = report
    assert (report.ok, report.kld, report.same_top1) == (True, found.kld, found.same_top1)
    assert report.reuse_ratio == found.reuse.kv_reuse_ratio > 0.3
    assert str(report).startswith("prompt 0: ok; ")
    assert found.reuse.chunks.method == "query"
    assert found.reuse.approximate > 32
    assert (found.problem, found.damaged) == ("", ())


@pytest.mark.needs("real model")
@pytest.mark.parametrize("il", [2, 28])
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.nightly
def test_a_scale_that_is_a_little_off(
    real: tuple[PromptCache, list[str]], monkeypatch: pytest.MonkeyPatch, il: int, which: str
) -> None:
    """One block of 32 elements of one row has a scale of 1.25 times its own."""

    def damaged(layer: LayerRows) -> LayerRows:
        rows = getattr(layer, which).copy()
        rows[9, :2] = (rows[9, :2].view(np.float16) * np.float16(1.25)).view(np.uint8)
        return replace(layer, **{which: rows})

    plant(monkeypatch, lambda block: with_layer(block, il, damaged))
    cache, prompts = real
    report = verify_correctness(cache, prompts, n_gen=2)
    found = report[0]
    assert not report.ok
    assert found.problem
    assert found.problem in str(report)
    assert len(found.damaged) >= 1


@pytest.fixture(scope="module")
def stepwise(real_model_q4_1: Path) -> Iterator[tuple[PromptCache, list[str]]]:
    """Q4_0 rows of a passage that was evaluated 50 tokens at a time, as answers and histories are."""
    passage = "Bread is made of flour, water and salt. The dough rests for a night in a cold room. " * 8
    with Llama(real_model_q4_1, kv="mixed", n_ctx=512, verbose=False) as llm, KVStore(None) as store:
        tokens = llm.tokenize(passage.encode(), add_bos=False)
        for i in range(0, len(tokens), 50):
            llm.eval(tokens[i : i + 50])
        store.save(llm)
        cache = PromptCache(llm, store, reuse="chunks", repair="none", check=0.0)
        yield cache, ["A text about what people eat and how it is made at home. " * 6 + passage + "In short:"]


@pytest.mark.nightly
@pytest.mark.needs("real model")
def test_rows_evaluated_in_other_steps_are_sound(stepwise: tuple[PromptCache, list[str]]) -> None:
    cache, prompts = stepwise
    (found,) = verify_correctness(cache, prompts, n_gen=2)
    assert found.reuse.approximate > 64
    assert (found.problem, found.damaged) == ("", ())


@pytest.mark.nightly
@pytest.mark.needs("real model")
@pytest.mark.parametrize("what", ["scale", "element", "noise"])
def test_damage_among_rows_evaluated_in_other_steps(
    stepwise: tuple[PromptCache, list[str]], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A block's scale off by a quarter, two elements by half of their range, or each by a step."""

    def damaged(layer: LayerRows) -> LayerRows:
        rows = layer.v.copy()
        if what == "scale":
            rows[-9, :2] = (rows[-9, :2].view(np.float16) * np.float16(1.25)).view(np.uint8)
        elif what == "element":
            rows[-9, 2] ^= 0x88
        else:
            rows[-9].reshape(-1, 18)[:, 2:] ^= 0x11
        return replace(layer, v=rows)

    plant(monkeypatch, lambda block: with_layer(block, 17, damaged))
    cache, prompts = stepwise
    (found,) = verify_correctness(cache, prompts, n_gen=2)
    assert found.problem
    assert len(found.damaged) == 1


def test_a_bound_that_is_not_met_is_a_problem(llm: Llama, store: KVStore, prompt: Tokens) -> None:
    cache = PromptCache(llm, store, reuse="chunks", repair="none", check=0.0)
    (found,) = verify_correctness(cache, [prompt], n_gen=2, max_kld=1e-12)
    assert "nats" in found.problem


@pytest.mark.parametrize("il", [0, 3])
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_damaged_row(
    llm: Llama, store: KVStore, prompt: Tokens, monkeypatch: pytest.MonkeyPatch, il: int, which: str
) -> None:
    def damaged(layer: LayerRows) -> LayerRows:
        rows = getattr(layer, which).copy()
        rows[7, 1] = 0x60  # the scale of a block of 32 elements is 512 or more
        return replace(layer, **{which: rows})

    plant(monkeypatch, lambda block: with_layer(block, il, damaged))
    assert not check(llm, store, prompt).ok


def test_a_wrong_turn(llm: Llama, store: KVStore, prompt: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows go where they belong, turned as if they had come from 3 positions further on."""
    load = llm.kv.load
    monkeypatch.setattr(
        type(llm.kv), "load", lambda _, block, seq=0, at=None, **more: load_turned(block, at, **more)
    )

    def load_turned(block: KVBlock, at: int | None, **more: bool) -> None:
        if at is None:
            load(block, **more)
            return
        by = 3
        groups = tuple(replace(group, positions=group.positions + by) for group in block.groups)
        load(replace(block, p0=block.p0 + by, p1=block.p1 + by, groups=groups), at=at)

    found = check(llm, store, prompt)
    assert "turned" in found.problem
    assert "layer 0" in found.problem


def test_a_shifted_chunk(llm: Llama, store: KVStore, prompt: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token gets the row of the one before it."""

    def shifted(block: KVBlock) -> KVBlock:
        def all_layers(layer: LayerRows) -> LayerRows:
            return replace(layer, k=np.roll(layer.k, 1, axis=0), v=np.roll(layer.v, 1, axis=0))

        groups = tuple(replace(group, layers=tuple(map(all_layers, group.layers))) for group in block.groups)
        return replace(block, groups=groups)

    plant(monkeypatch, shifted)
    found = check(llm, store, prompt)
    assert "layer 0" in found.problem
    assert found.worst_row > 0.5


@pytest.mark.parametrize(
    ("differ", "is_damage"),
    [((), False), ((7,), True), ((7, 9), True), ((29,), False), ((28, 29), False), ((28,), True)],
)
def test_few_layers_that_differ_are_damage_unless_it_goes_on(
    differ: tuple[int, ...], is_damage: bool
) -> None:
    """Rounding can begin in any layer, the last one too, and is in all layers behind it."""
    off = {(il, "K"): np.full((1, 2), 0.01 if il in differ else 0, np.float32) for il in range(30)}
    errors = RowErrors({}, off, {}, dict.fromkeys(off, "q4_0"))
    assert errors.isolated.tolist() == [is_damage]
    assert bool(errors.problem(np.array([3]))) == is_damage


def test_a_method_may_be_given_by_the_name_of_its_repair(llm: Llama, store: KVStore, prompt: Tokens) -> None:
    cache = PromptCache(llm, store, reuse="chunks", check=0.0)
    (by_name,) = verify_correctness(cache, [prompt], "none", n_gen=2)
    (given,) = verify_correctness(cache, [prompt], Method(repair="none"), n_gen=2)
    assert by_name.reuse.approximate == given.reuse.approximate > 0
    with pytest.raises(ValueError, match="repair='often': use one of none, seam"):
        verify_correctness(cache, [prompt], "often", n_gen=2)  # type: ignore[arg-type]
