"""`llm.kv` on sequences: what is removed, copied, moved and kept, and what the `Llama` knows of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.errors import UnsupportedModelError

pytestmark = pytest.mark.core

OPTIONS = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
TOKENS = [3 + i * 7 % 90 for i in range(60)]
OTHER = TOKENS[::-1]


@pytest.fixture(params=["f16", "mixed:threshold=16,group=8"])
def llm(request: pytest.FixtureRequest, zoo_path: Callable[[str], Path]) -> Iterator[Llama]:
    options = {**OPTIONS, "n_seq_max": 3, "kv_unified": True}
    with Llama(zoo_path("llama-64"), kv=request.param, **options) as llm:
        llm.eval(TOKENS)
        yield llm


def test_used_counts_cells(llm: Llama) -> None:
    assert llm.kv.used == len(TOKENS)
    llm.kv.copy(0, 1)
    assert llm.kv.used == len(TOKENS)
    llm.kv.clear()
    assert (llm.kv.used, llm.n_tokens, llm.kv.positions(1)) == (0, 0, (-1, -1))


def test_a_removed_tail_is_gone_for_the_llama_too(llm: Llama) -> None:
    llm.kv.remove(0, 40)
    assert llm.n_tokens == 40
    assert llm.kv.positions(0) == (0, 39)
    llm.eval(TOKENS[40:])
    assert llm.kv.positions(0) == (0, 59)


def test_a_hole_closes_by_a_shift_and_the_tokens_follow(llm: Llama) -> None:
    llm.kv.remove(0, 8, 24)
    assert (llm.n_tokens, llm.kv.used) == (60, 44)
    assert llm.kv.exact_tokens == 8
    llm.kv.shift(0, 24, -1, -16)
    assert llm.n_tokens == 44
    assert llm.input_ids[:44].tolist() == TOKENS[:8] + TOKENS[24:]
    assert llm.kv.positions(0) == (0, 43)
    block = llm.kv.export()  # every position once
    assert block.tokens.tolist() == TOKENS[:8] + TOKENS[24:]
    llm.eval([5])
    assert llm.kv.exact_tokens == 8


def test_a_copy_has_the_rows_of_its_range(llm: Llama) -> None:
    llm.kv.copy(0, 2, p1=30)
    assert llm.kv.positions(2) == (0, 29)
    first, second = (llm.kv.layer(1).k(seq, 0, 30) for seq in (0, 2))
    cold = ~(llm.kv.layer(1).hot(0, 0, 30) | llm.kv.layer(1).hot(2, 0, 30))
    assert cold.any() or "mixed" not in llm.kv.stats().kv
    assert np.array_equal(first[cold], second[cold])
    llm.kv.remove(2)
    assert llm.kv.positions(2) == (-1, -1)
    assert llm.kv.positions(0) == (0, 59)


def test_keep_drops_all_others(llm: Llama) -> None:
    llm.kv.copy(0, 1)
    llm.kv.copy(0, 2, p1=20)
    llm.kv.keep(2)
    assert [llm.kv.positions(seq) for seq in range(3)] == [(-1, -1), (-1, -1), (0, 19)]
    assert (llm.kv.used, llm.n_tokens) == (20, 0)


def test_copying_into_sequence_0_makes_no_claim(llm: Llama) -> None:
    llm.kv.copy(0, 1)
    llm.kv.remove(0)
    llm.kv.copy(1, 0)
    assert llm.kv.exact_tokens == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda kv: kv.remove(3), "seq=3: this context has the sequences 0 to 2"),
        (lambda kv: kv.remove(-1), "seq=-1: this context has"),
        (lambda kv: kv.remove(0, -5), r"\[-5, -1\) is not a valid range"),
        (lambda kv: kv.remove(0, 9, 3), r"\[9, 3\) is not a valid range"),
        (lambda kv: kv.copy(0, 9), "target=9: this context has"),
        (lambda kv: kv.copy(7, 0), "seq=7: this context has"),
        (lambda kv: kv.shift(0, 4, -1, -5), r"by=-5 moves \[4, 60\) out of"),
        (lambda kv: kv.shift(0, 4, -1, 400), "by=400 moves position 59 beyond"),
        (lambda kv: kv.shift(1, 0, 2**31 - 1, 2), "by=2 moves"),
        (lambda kv: kv.keep(11), "seq=11: this context has"),
        (lambda kv: kv.positions(3), "seq=3: this context has"),
    ],
)
def test_bad_calls_change_nothing(llm: Llama, call: Callable[..., None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(llm.kv)
    assert (llm.n_tokens, llm.kv.used, llm.kv.positions(0)) == (60, 60, (0, 59))
    assert llm.input_ids[:60].tolist() == TOKENS
    assert llm.kv.exact_tokens == 60


def test_parts_are_not_copied_between_streams(zoo_path: Callable[[str], Path]) -> None:
    """llama.cpp itself would abort."""
    with Llama(zoo_path("llama-64"), kv="mixed", n_seq_max=2, **{**OPTIONS, "n_ctx": 512}) as llm:
        llm.eval(TOKENS)
        for p0, p1 in ((0, 30), (5, -1)):
            with pytest.raises(ValueError, match="kv_unified=True"):
                llm.kv.copy(0, 1, p0, p1)
        llm.kv.copy(0, 1, 0, 60)  # the whole of it
        llm.eval([5])
        assert llm.kv.positions(0) == (0, 60)
        llm.kv.copy(0, 1)
        assert llm.kv.layer(0).k(1).shape[0] == 61


def test_models_with_states_say_what_they_cannot(zoo_path: Callable[[str], Path]) -> None:
    with Llama(zoo_path("lfm2"), kv="mixed", **OPTIONS) as llm:
        llm.eval(TOKENS)
        assert not llm.kv.can_cut
        with pytest.raises(UnsupportedModelError, match="remove all of it"):
            llm.kv.remove(0, 30)
        assert (llm.n_tokens, llm.kv.positions(0)[1]) == (60, 59)
        llm.kv.remove(0)
        assert (llm.n_tokens, llm.kv.used) == (0, 0)


@pytest.mark.by_model
@pytest.mark.parametrize(("name", "kv"), [("lfm2", "mixed"), ("mamba", "f16")])
def test_states_are_copied_whole(zoo_path: Callable[[str], Path], name: str, kv: str) -> None:
    """Of part of the tokens there is no state."""
    with Llama(zoo_path(name), kv=kv, n_seq_max=3, kv_unified=True, **OPTIONS) as llm:
        llm.eval(TOKENS)
        for p0, p1 in ((0, 30), (30, -1)):
            with pytest.raises(UnsupportedModelError, match="copy all of it"):
                llm.kv.copy(0, 1, p0, p1)
        assert llm.kv.positions(1) == (-1, -1)
        llm.kv.copy(0, 1)
        llm.kv.copy(0, 2, 0, 60)
        assert llm.kv.positions(1) == llm.kv.positions(2) == llm.kv.positions(0)
        assert not llm.kv.can_shift
        with pytest.raises(UnsupportedModelError, match="cannot be moved"):
            llm.kv.shift(0, 0, -1, 3)


def test_a_copy_takes_the_place_of_what_was_there(llm: Llama) -> None:
    """Every position once, as attention wants it."""
    llm.kv.copy(0, 1)
    llm.kv.remove(0)
    llm.eval(OTHER)
    llm.kv.copy(0, 1, 10, 40)
    assert llm.kv.export(1, tokens=range(60)).p1 == 60
    assert np.array_equal(llm.kv.layer(0).positions(1), np.arange(60))
    llm.kv.copy(0, 0)
    assert (llm.n_tokens, llm.kv.positions(0)) == (60, (0, 59))


def test_what_moves_in_another_sequence_too_is_no_longer_the_llamas(llm: Llama) -> None:
    llm.kv.copy(0, 1)
    llm.kv.shift(1, 0, -1, 7)
    assert llm.kv.positions(0) == llm.kv.positions(1) == (7, 66)
    assert llm.n_tokens == 0
    llm.eval(TOKENS)
    assert (llm.kv.positions(0), llm.kv.exact_tokens) == ((0, 59), 60)


def test_models_whose_positions_stay_say_so(zoo_path: Callable[[str], Path]) -> None:
    with Llama(zoo_path("gemma2"), kv="f16", swa_full=False, n_ubatch=64, **{**OPTIONS, "n_ctx": 512}) as llm:
        llm.eval(TOKENS)
        assert llm.kv.can_cut
        assert not llm.kv.can_shift
        with pytest.raises(UnsupportedModelError, match="swa_full=True"):
            llm.kv.shift(0, 20, -1, -5)


def test_there_is_one_object(llm: Llama) -> None:
    assert llm.kv is llm.kv


def test_a_closed_llama_has_no_cache(zoo_path: Callable[[str], Path]) -> None:
    llm = Llama(zoo_path("llama-64"), kv="mixed", **OPTIONS)
    kv = llm.kv
    llm.close()
    for call in (lambda: kv.used, lambda: kv.remove(0), lambda: kv.positions(), lambda: kv.can_shift):
        with pytest.raises(RuntimeError, match="closed"):
            call()
