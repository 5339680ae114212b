"""`llm.kv.export` and `llm.kv.load`: blocks on a `Llama`, and `KVBlock` itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixedkv import KVBlock, Llama
from mixedkv.bundled import model_path

pytestmark = pytest.mark.core

SETTINGS = ("f16", "q8_0", "q4_0", "mixed", "mixed:quality,threshold=128")
TOKENS = [3 + i * 7 % 250 for i in range(300)]


def open_bundled(kv: str, **options: Any) -> Llama:
    return Llama(model_path(), kv=kv, n_ctx=512, n_threads=1, verbose=False, **options)


@pytest.fixture(scope="module")
def llm() -> Iterator[Llama]:
    with open_bundled("mixed") as llm:
        yield llm


@pytest.fixture(scope="module")
def block(llm: Llama) -> KVBlock:
    llm.reset()
    llm.eval(TOKENS)
    return llm.kv.export()


def continuation(llm: Llama, n: int = 24) -> list[int]:
    tokens = []
    for token in llm.generate(TOKENS, temp=0.0, reset=True):
        tokens.append(token)
        if len(tokens) == n:
            return tokens
    return tokens


@pytest.mark.parametrize("kv", SETTINGS)
def test_a_loaded_prompt_is_not_evaluated_again(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_bundled(kv) as llm:
        llm.eval(TOKENS[:-1])
        block = llm.kv.export()
        want = continuation(llm)
    with open_bundled(kv) as llm:
        llm.kv.load(block)
        assert llm.n_tokens == len(TOKENS) - 1
        evaluated: list[int] = []
        monkeypatch.setattr(llm, "eval", lambda tokens: (evaluated.extend(tokens), Llama.eval(llm, tokens)))
        assert continuation(llm) == want
        assert evaluated[0] == TOKENS[-1]
        assert len(evaluated) == len(want)


def test_export_tells_tokens_and_positions(llm: Llama, block: KVBlock) -> None:
    assert (block.p0, block.p1, len(block)) == (0, 300, 300)
    assert block.tokens.tolist() == TOKENS
    assert repr(block) == f"<KVBlock [0, 300), 6 layers, {block.nbytes} bytes>"
    (group,) = block.groups
    assert group.positions.tolist() == list(range(300))
    stats = llm.kv.stats()
    assert len(group.hot) == stats.sequences[0].n_hot
    assert [layer.il for layer in group.layers] == list(range(6))
    assert {(layer.type_k, layer.type_v) for layer in group.layers} == {("q4_0", "q4_0")}


def test_a_range_costs_that_range(llm: Llama, block: KVBlock) -> None:
    turn = llm.kv.export(p0=200, p1=210)
    assert (turn.p0, turn.p1) == (200, 210)
    assert turn.nbytes < block.nbytes / 20


def test_leftovers_make_room(llm: Llama, block: KVBlock) -> None:
    """`reset` leaves the rows where they are; `eval` and `load` take their place."""
    llm.reset()
    llm.eval(TOKENS[::-1])
    llm.reset()
    llm.kv.load(block.slice(0, 100))
    llm.kv.load(block.slice(100, 300))
    assert llm.n_tokens == 300
    assert llm.input_ids[:300].tolist() == TOKENS


def test_other_sequences_give_their_tokens() -> None:
    with open_bundled("mixed", n_seq_max=2, kv_unified=True) as llm:
        llm.eval(TOKENS)
        llm.kv.load(llm.kv.export(p1=200), seq=1)
        with pytest.raises(ValueError, match=r"tokens: give the ids at \[0, 200\) of seq=1"):
            llm.kv.export(seq=1)
        assert llm.kv.export(seq=1, tokens=TOKENS[:200]).tokens.tolist() == TOKENS[:200]
        with pytest.raises(ValueError, match="tokens has the shape"):
            llm.kv.export(seq=1, tokens=TOKENS)


def test_loaded_at_another_place(llm: Llama, block: KVBlock) -> None:
    llm.reset()
    llm.eval(TOKENS[:10])
    llm.kv.load(block.slice(100, 140), at=10)
    assert llm.n_tokens == 50
    assert llm.input_ids[10:50].tolist() == TOKENS[100:140]
    for at in (-1, 2**31 - 1, 2**40):
        with pytest.raises(ValueError, match="at="):
            llm.kv.load(block, at=at)


def test_a_closed_llama_says_so(block: KVBlock) -> None:
    llm = open_bundled("mixed")
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.kv.load(block)
    with pytest.raises(RuntimeError, match="closed"):
        llm.kv.export()


def test_description_and_arrays_read_back(block: KVBlock) -> None:
    again = KVBlock.from_arrays(json.loads(json.dumps(block.describe())), block.to_arrays())
    assert again.describe() == block.describe()
    have, want = again.to_arrays(), block.to_arrays()
    assert have.keys() == want.keys()
    assert all(np.array_equal(have[name], want[name]) for name in want)


@settings(max_examples=50)
@given(cut=st.lists(st.integers(0, 300), min_size=2, max_size=2, unique=True).map(sorted))
def test_slices(block: KVBlock, cut: list[int]) -> None:
    p0, p1 = cut
    part = block.slice(p0, p1)
    KVBlock.from_arrays(part.describe(), part.to_arrays())
    whole, group = block.groups[0], part.groups[0]
    assert part.tokens.tolist() == TOKENS[p0:p1]
    assert group.positions.tolist() == list(range(p0, p1))
    assert group.positions[group.hot].tolist() == [
        p for p in whole.positions[whole.hot].tolist() if p0 <= p < p1
    ]
    assert np.array_equal(group.layers[2].v, whole.layers[2].v[p0:p1])


@pytest.mark.parametrize("cut", [(-1, 5), (5, 5), (7, 3), (0, 301)])
def test_slices_out_of_range(block: KVBlock, cut: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="not within this block's"):
        block.slice(*cut)


def _damage(description: dict[str, Any], arrays: dict[str, Any], data: st.DataObject) -> None:
    """One change to what came from outside."""
    name = data.draw(st.sampled_from(sorted(arrays)))
    array = arrays[name]
    layer = description["groups"][0]["layers"][data.draw(st.integers(0, 5))]
    bad = [None, True, -1, 0.5, 2**31, 2**63, "q4_0", [], {}]
    match data.draw(st.integers(0, 7)):
        case 0:
            del arrays[name]
        case 1:
            arrays[name] = array[:-1]
        case 2:
            arrays[name] = array.astype(np.float64)
        case 3:
            arrays[name] = array.reshape(*array.shape, 1)
        case 4:
            field = data.draw(st.sampled_from([key for key in layer if key != "il"]))
            good = [layer[field]]
            if field == "equalization":  # any 32 bits tell scales apart
                good.append(2**31)
            layer[field] = data.draw(st.sampled_from([v for v in bad if v not in good]))
        case 5:
            layer["il"] = data.draw(st.sampled_from([*bad, 7]))
        case 6:
            description[data.draw(st.sampled_from(sorted(description)))] = data.draw(st.sampled_from(bad))
        case 7:
            name = data.draw(st.sampled_from(["0.positions", "0.hot"]))
            arrays[name] = arrays[name][::-1]


@settings(max_examples=300)
@given(data=st.data())
def test_bytes_from_outside(block: KVBlock, data: st.DataObject) -> None:
    description, arrays = json.loads(json.dumps(block.describe())), block.to_arrays()
    _damage(description, arrays, data)
    with pytest.raises(ValueError, match=r"\w"):
        KVBlock.from_arrays(description, arrays)


def test_no_token_without_its_rows(block: KVBlock) -> None:
    short, description = block.slice(0, 299), block.describe()
    with pytest.raises(ValueError, match="none has all rows"):
        KVBlock.from_arrays(description, {**short.to_arrays(), "tokens": block.tokens})


def test_a_block_made_by_hand_is_checked(llm: Llama, block: KVBlock) -> None:
    layer = replace(block.groups[0].layers[0], head_size_k=60)
    group = replace(block.groups[0], layers=(layer, *block.groups[0].layers[1:]))
    llm.reset()
    with pytest.raises(ValueError, match="layer 0: rotation_k"):
        llm.kv.load(replace(block, groups=(group,)))


def test_another_model(block: KVBlock, zoo_path: Any) -> None:
    path: Path = zoo_path("llama-64")
    with Llama(path, kv="mixed", n_ctx=512, n_threads=1, verbose=False) as llm:
        with pytest.raises(ValueError, match="layers in a group"):
            llm.kv.load(block)
        assert llm.n_tokens == 0
