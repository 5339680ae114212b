"""What a row is goes where the row goes: copies, blocks, states, other tokens in its cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from mixedkv import KVBlock, Llama, _core
from mixedkv.engine.prompt_cache import PromptCache
from mixedkv.kv.rows import extend_past
from mixedkv.store import Identity, KVStore

pytestmark = pytest.mark.full

OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
SHARED = {"n_seq_max": 3, "kv_unified": True}
TOKENS = [3 + i * 7 % 90 for i in range(200)]
OTHER = TOKENS[::-1]
KVS = ("f16", "q8_0", "mixed:threshold=32,group=8")


@pytest.fixture(params=KVS)
def llm(request: pytest.FixtureRequest, zoo_path: Callable[[str], Path]) -> Iterator[Llama]:
    """A context whose sequence 0 has 120 exact rows, and 80 that are not."""
    with Llama(zoo_path("llama-64"), kv=request.param, **OPTIONS, **SHARED) as llm:
        llm.eval(TOKENS[:120])
        llm.kv.load(llm.kv.export(p0=20, p1=100), at=120)
        llm.kv.assume(TOKENS, 200)  # whatever is assumed
        assert llm.kv.exact_tokens == 120
        yield llm


def test_a_copy_is_what_it_is_copied_from(llm: Llama) -> None:
    llm.kv.copy(0, 1)
    assert llm.kv.exact(1, TOKENS) == 120
    with KVStore(None) as store:
        assert store.save(llm, TOKENS, 1).n_tokens == 120
        assert store.find(Identity.of(llm), TOKENS).n_tokens == 120  # type: ignore[union-attr]


def test_tokens_that_follow_are_no_better(llm: Llama) -> None:
    llm.eval(OTHER[:20])
    assert llm.kv.exact_tokens == 120
    llm.kv.remove(0, 120)
    llm.eval(OTHER[:20])
    assert llm.kv.exact_tokens == (140 if "mixed" not in str(llm.kv.config) else 120)


def test_a_block_says_it_on_every_way(llm: Llama) -> None:
    whole = llm.kv.export()
    assert whole.n_exact == 120
    again = KVBlock.from_arrays(whole.describe(), whole.to_arrays())
    assert again.n_exact == 120
    llm.kv.copy(0, 1)
    llm.reset()
    assert llm.kv.export(1, tokens=TOKENS).n_exact == 120
    with KVStore(None) as store, pytest.raises(ValueError, match="position 120 is doubted"):
        store.put(Identity.of(llm), again)
    for block, n in ((again, 120), (again.slice(0, 100), 100)):
        llm.reset()
        llm.kv.load(block)
        assert (llm.n_tokens, llm.kv.exact_tokens) == (block.p1, n)
    with KVStore(None) as store:
        assert store.put(Identity.of(llm), again.slice(0, 120))


def test_a_block_behind_other_tokens_is_approximate(llm: Llama) -> None:
    """Its rows were computed from what was before them."""
    block = llm.kv.export(p0=40, p1=100)
    for part in (block, block.slice(60, 100)):
        for before, n_exact in ((TOKENS, 100), (OTHER, part.p0)):
            llm.reset()
            llm.eval(before[: part.p0])
            llm.kv.load(part)
            assert (llm.n_tokens, llm.kv.exact_tokens) == (100, n_exact)


def test_the_hash_of_the_past_is_the_librarys() -> None:
    tokens = np.array([0, 5, -1, -7, 2**31 - 1, *TOKENS], np.int32)
    assert extend_past(2**64 - 3, tokens) == _core.extend_past(2**64 - 3, tokens)


def test_a_part_of_another_sequence_is_approximate(llm: Llama) -> None:
    llm.kv.copy(0, 1)
    llm.reset()
    llm.eval(OTHER[:40])
    llm.kv.copy(1, 0, 40, 100)
    assert llm.kv.exact(0, [*OTHER[:40], *TOKENS[40:100]]) == 40


@pytest.mark.parametrize("name", ["truth", "past", "setting"])
def test_a_block_has_to_say_what_its_rows_are(llm: Llama, name: str) -> None:
    block = llm.kv.export(p1=100)
    description = block.describe()
    del description[name]
    with pytest.raises(ValueError, match=name):
        KVBlock.from_arrays(description, block.to_arrays())


def test_a_block_of_which_nothing_is_known_is_not_exact(llm: Llama) -> None:
    block = replace(llm.kv.export(p1=100), validity=None)  # type: ignore[arg-type]
    llm.reset()
    llm.kv.load(block)
    assert (llm.n_tokens, llm.kv.exact_tokens) == (100, 0)


def test_rows_of_other_tokens_are_not_vouched_for(llm: Llama) -> None:
    llm.kv.remove(0)
    llm.eval(OTHER[:50])
    llm.kv.copy(0, 1)
    llm.kv.remove(0)
    llm.eval(TOKENS[:50])
    llm.kv.copy(1, 0)  # which the Llama does not notice
    same = next(i for i in range(50) if TOKENS[i] != OTHER[i])
    assert llm.kv.exact_tokens == same
    assert llm.kv.exact(0, OTHER[:50]) == 50


def test_shared_cells_that_move_move_for_all(llm: Llama) -> None:
    llm.kv.copy(0, 1)
    llm.kv.remove(1, 50, 80)
    llm.kv.shift(1, 80, 110, -30)
    assert llm.n_tokens == 0
    assert llm.kv.exact(1, TOKENS[:50]) == 50


def test_a_position_that_is_there_twice_is_not_vouched_for(llm: Llama) -> None:
    """Cells that another sequence shares move onto a position that it has already."""
    llm.kv.copy(0, 1)
    llm.kv.remove(1, 50, 80)
    llm.kv.shift(1, 80, 110, -31)
    assert llm.kv.exact(0, TOKENS) == 49


def test_rows_that_were_moved_and_moved_back_are_approximate(llm: Llama) -> None:
    """Two turns of a key round twice. llama.cpp's own function moves them, past `llm.kv`."""
    llm.kv.remove(0, 50)
    memory = llama_cpp.llama_get_memory(llm.ctx)
    llama_cpp.llama_memory_seq_add(memory, 0, 10, 50, 7)
    llama_cpp.llama_memory_seq_add(memory, 0, 17, 57, -7)
    assert llm.kv.exact_tokens == 50  # nothing was turned in between
    llama_cpp.llama_memory_seq_add(memory, 0, 10, 50, 7)
    assert llm.kv.exact(0, TOKENS[:10]) == 10
    llama_cpp.llama_memory_seq_add(memory, 0, 17, 57, -7)
    assert llm.kv.exact_tokens == 10
    llm.eval(TOKENS[:3])
    assert llm.kv.exact_tokens == 10


def test_a_state_is_doubted_in_cells_that_were_not(zoo_path: Callable[[str], Path]) -> None:
    with Llama(zoo_path("llama-64"), kv="f16", **OPTIONS) as llm:
        llm.eval(OTHER)
        state = llm.save_state()
        assert llm.kv.exact_tokens == 200  # saving changes nothing
        llm.reset()
        llm.eval(TOKENS)
        llm.load_state(state)
        assert (llm.n_tokens, llm.kv.exact_tokens) == (200, 0)
        llm.eval(TOKENS[:5])
        assert llm.kv.exact_tokens == 0
        llm.reset()
        llm.eval(TOKENS)
        assert llm.kv.exact_tokens == 200


@pytest.mark.parametrize("kv", KVS)
def test_a_copy_to_another_stream(kv: str, zoo_path: Callable[[str], Path]) -> None:
    with Llama(zoo_path("llama-64"), kv=kv, n_seq_max=2, **OPTIONS) as llm:
        llm.eval(TOKENS)
        llm.kv.limit_exact(70)
        llm.kv.copy(0, 1)
        assert llm.kv.exact(1, TOKENS) == 70
        assert llm.kv.exact(1, OTHER) == next(i for i in range(200) if TOKENS[i] != OTHER[i])


@pytest.mark.parametrize("kv", KVS)
def test_sequences_of_an_engine(kv: str, zoo_path: Callable[[str], Path]) -> None:
    llm = Llama(zoo_path("llama-64"), kv=kv, n_batch=64, **OPTIONS, **SHARED)
    with llm, PromptCache(llm, None, parallel=2) as cache:
        cache.generate(TOKENS[:100], max_tokens=4, temperature=0)
        cache.generate(TOKENS[:80] + OTHER[:30], max_tokens=4, temperature=0)
        held = cache.engine.call(
            lambda: [
                (cache.engine.pool.is_exact(seq), len(seq.tokens), llm.kv.exact(seq.id, seq.tokens))
                for seq in cache.engine.pool.held()
            ]
        ).result()
    assert held
    assert all(counted == n for exact, n, counted in held if exact)
