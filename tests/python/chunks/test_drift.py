"""Rows that stay a donor's follow the evaluated ones near them, and rows that are not a donor's are told."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.chunks.donors import DonorIndex
from mixedkv.chunks.drift import DamagedRowsError, Drift, RepairedLayers, _Places, _with_rows, slices
from mixedkv.engine import PromptCache
from mixedkv.kv.block import KVBlock
from mixedkv.store import KVStore
from mixedkv_bench.harness.real_text import read_real_text
from support.engine.conversations import RECALL, empty, open_llama

pytestmark = pytest.mark.full

BEGIN, END = 40, 140
CHOSEN = np.arange(END - BEGIN) % 6 == 0


def tokens_of(llm: Llama) -> np.ndarray:
    return np.array(llm.tokenize(RECALL.text.encode()), np.int32)[:160]


def place(llm: Llama, before: np.ndarray) -> np.ndarray:
    """Leave a passage in sequence 0 that was computed behind other tokens; the prompt."""
    tokens = tokens_of(llm)
    empty(llm)
    llm.eval([*before.tolist(), *tokens[BEGIN:END].tolist()])
    donor = llm.kv.export(0, len(before), len(before) + END - BEGIN).without_hot()
    empty(llm)
    llm.eval(tokens[:BEGIN].tolist())
    llm.kv.load(donor, at=BEGIN)
    llm.kv.fill(tokens[END:], np.arange(END, len(tokens)))  # turns K
    llm.kv.remove(0, END)
    return tokens


def rows_of(llm: Llama) -> np.ndarray:
    layers = [llm.kv.layer(layer.il) for layer in llm.kv.stats(by_layer=True).layers or ()]
    return np.stack([view.v(0, BEGIN, END, basis="model") for view in layers])


def evaluate_chosen(llm: Llama, tokens: np.ndarray, chosen: np.ndarray = CHOSEN) -> None:
    at = np.flatnonzero(chosen) + BEGIN
    for position in at.tolist():
        llm.kv.remove(0, position, position + 1)
    llm.kv.fill(tokens[at], at)


@pytest.mark.parametrize("cold", ["q4_0", "q8_0"])
def test_rows_that_were_not_chosen_come_nearer(cold: str) -> None:
    with open_llama(f"mixed:cold={cold}", n_ctx=512) as llm:
        tokens = place(llm, tokens_of(llm)[90:120])
        moved = rows_of(llm)
        drift = Drift(llm.kv, RepairedLayers.of(llm.kv), 0, BEGIN, END, CHOSEN)
        evaluate_chosen(llm, tokens)
        drift.correct(tokens[BEGIN:END], 0, END - BEGIN)
        corrected = rows_of(llm)
        assert llm.kv.positions(0) == (0, END - 1)
        empty(llm)
        llm.eval(tokens[:END].tolist())
        exact = rows_of(llm)
        deep = slice(len(exact) // 2, None)
        assert (
            np.square(corrected - exact)[deep, ~CHOSEN].sum()
            < 0.9 * np.square(moved - exact)[deep, ~CHOSEN].sum()
        )


@pytest.mark.parametrize("kv", ["mixed", "mixed:cold=q8_0", "mixed:cold=lm4"])
def test_without_a_change_rows_stay_to_the_bit(kv: str) -> None:
    with open_llama(kv, n_ctx=512) as llm:
        tokens = place(llm, tokens_of(llm)[:BEGIN])
        before = llm.kv.export(0, 0, END, tokens[:END])
        drift = Drift(llm.kv, RepairedLayers.of(llm.kv), 0, BEGIN, END, CHOSEN)
        drift.correct(tokens[BEGIN:END], 0, END - BEGIN)
        after = llm.kv.export(0, 0, END, tokens[:END])
        for layer, other in zip(before.groups[0].layers, after.groups[0].layers, strict=True):
            assert np.array_equal(layer.v[BEGIN:], other.v[BEGIN:])


@pytest.mark.parametrize("cold", ["q4_0", "q8_0"])
@pytest.mark.parametrize("damage", ["", "text", "position", "noise"])
def test_damage_is_told_from_another_context(cold: str, damage: str) -> None:
    random = np.random.default_rng(1)
    with open_llama(f"mixed:cold={cold}", n_ctx=512) as llm:
        tokens = place(llm, tokens_of(llm)[90:120])
        if damage:
            spoil(llm, tokens, damage, random)
        drift = Drift(llm.kv, RepairedLayers.of(llm.kv), 0, BEGIN, END, CHOSEN)
        evaluate_chosen(llm, tokens)
        if damage:
            with pytest.raises(DamagedRowsError, match="in layer"):
                drift.correct(tokens[BEGIN:END], 0, END - BEGIN)
        else:
            drift.correct(tokens[BEGIN:END], 0, END - BEGIN)


@pytest.mark.parametrize("il", range(6))
def test_damage_in_any_layer_is_told(il: int) -> None:
    with open_llama("mixed:cold=q8_0", n_ctx=512) as llm:
        tokens = place(llm, tokens_of(llm)[90:120])
        block = llm.kv.export(0, BEGIN, END, tokens[BEGIN:END]).without_hot()
        layers, view = list(block.groups[0].layers), llm.kv.layer(il)
        k, v = (read(0, BEGIN, END, basis="model") for read in (view.k, view.v))
        layers[il] = _with_rows(layers[il], [k, 10 * v])
        llm.kv.replace(replace(block, groups=(replace(block.groups[0], layers=tuple(layers)),)))
        chosen = CHOSEN | (np.arange(END - BEGIN) < 8)  # as a repair chooses, most at the beginning
        drift = Drift(llm.kv, RepairedLayers.of(llm.kv), 0, BEGIN, END, chosen)
        evaluate_chosen(llm, tokens, chosen)
        with pytest.raises(DamagedRowsError, match=f"V of the passage .* in layer {il}"):
            drift.correct(tokens[BEGIN:END], 0, END - BEGIN)


def spoil(llm: Llama, tokens: np.ndarray, damage: str, random: np.random.Generator) -> None:
    """Give the passage other rows: of the token beside it, turned by one position too many, or noise."""
    block = llm.kv.export(0, BEGIN, END, tokens[BEGIN:END]).without_hot()
    if damage == "position":
        llm.kv.remove(0, BEGIN)
        llm.kv.load(block, at=BEGIN + 1)
        llm.kv.fill(tokens[END:], np.arange(END + 1, len(tokens) + 1))
        llm.kv.remove(0, END + 1)
    layers = []
    for layer in block.groups[0].layers:
        view, by = llm.kv.layer(layer.il), int(damage == "position")
        rows = [read(0, BEGIN + by, END + by, basis="model") for read in (view.k, view.v)]
        if damage == "text":
            rows = [np.roll(each, 1, axis=0) for each in rows]
        if damage == "noise":
            rows = [
                each + each.std() * random.standard_normal(each.shape).astype(np.float32) for each in rows
            ]
        layers.append(_with_rows(layer, rows))
    if damage == "position":
        llm.kv.remove(0, BEGIN)
        llm.kv.load(block)
    llm.kv.replace(replace(block, groups=(replace(block.groups[0], layers=tuple(layers)),)))


@pytest.mark.parametrize("repair", ["seam", "cacheblend", "query"])
def test_a_prompt_with_rows_of_another_text_is_evaluated(
    llm: Llama, store: KVStore, monkeypatch: pytest.MonkeyPatch, repair: str
) -> None:
    read = DonorIndex.read

    def beside(self: DonorIndex, *place: object) -> list[KVBlock] | None:
        blocks = read(self, *place)  # type: ignore[arg-type]
        return None if blocks is None else [rolled(block) for block in blocks]

    def rolled(block: KVBlock) -> KVBlock:
        layers = tuple(
            replace(layer, k=np.roll(layer.k, 1, axis=0), v=np.roll(layer.v, 1, axis=0))
            for layer in block.groups[0].layers
        )
        return replace(block, groups=(replace(block.groups[0], layers=layers),))

    tokens = tokens_of(llm)
    cache = PromptCache(llm, store, reuse="chunks", repair=repair, check=0.0, chunk_size=32)
    cache.warm([tokens[40:140]])
    empty(llm)
    assert not cache.prefill(tokens).exact
    monkeypatch.setattr(DonorIndex, "read", beside)
    empty(llm)
    reuse = cache.prefill(tokens)
    assert reuse.exact
    assert "of its size" in reuse.reason


@pytest.fixture(scope="module")
def shared() -> object:
    with open_llama("mixed", n_ctx=512) as llm:
        yield llm


@pytest.mark.needs("real model")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prose", "code"])
@pytest.mark.parametrize("repair", ["seam", "query"])
def test_sound_reuse_on_a_real_model_trips_no_gate(real_model: Path, kind: str, repair: str) -> None:
    """Neither the look at the rows of each request nor the checks, of which this makes one a request."""
    text = read_real_text(kind).text
    passages = [text[begin : begin + 500] for begin in range(len(text) // 2, len(text) // 2 + 4000, 1000)]
    with Llama(real_model, kv="mixed:cold=q8_0", n_ctx=768, verbose=False) as llm, KVStore(None) as store:
        cache = PromptCache(llm, store, reuse="chunks", repair=repair, check=1.0)
        cache.warm(passages)
        klds = []
        for i in range(10):
            first, second = passages[i % 4], passages[(i + 1 + i // 4) % 4]
            head = f"Read what follows with care, and then answer question {i}. " * 6
            reuse = cache.prefill(f"{head}\n\n{first}\n\n{second}\n\nSummarize the passages above.\n")
            assert not reuse.exact, reuse.reason
            deviation = cache.check_pending()
            assert deviation is not None
            klds.append(deviation.kld)
        assert cache.stats()["chunks"]["off"] == ""
        assert np.median(klds) < 0.125  # half of what closes the gate


@pytest.mark.parametrize(
    ("n", "edges"),
    [
        (1, [0, 1]),
        (384, [0, 384]),  # a rest of less than half a part is of the part before it
        (385, [0, 256, 385]),
        (1024, [0, 256, 1024]),
        (1025, [0, 256, 768, 1025]),
        (2000, [0, 256, 768, 1280, 2000]),
    ],
)
def test_a_passage_is_corrected_in_parts_that_grow(n: int, edges: list[int]) -> None:
    assert slices(n) == list(pairwise(edges))


def test_changes_of_near_rows_and_of_rows_that_are_alike_go_together() -> None:
    at = np.array([0, 8, 64, 512])
    places = _Places(at, at[:1])
    near = [np.mean([np.exp(-d / reach) for reach in (8, 64, 512)]) for d in at]
    assert places.near[:, 0] == pytest.approx(near)
    far = np.exp(-at / 512)
    for cosine, share in ((1.0, 1.0), (0.5, 0.5), (-1.0, 0.0)):  # rows that are opposite share nothing
        found = places.covariance(np.full((4, 1), cosine, np.float32))[:, 0]
        assert found == pytest.approx(near + share * far)
