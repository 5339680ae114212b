"""What a sequence has is asked of its cells and states: where it can be cut, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from mixedkv import Llama, _core
from mixedkv.errors import MissingRowsError
from mixedkv.native import llama_cpp as _llama_cpp

pytestmark = pytest.mark.full

OPTIONS: dict[str, Any] = {
    "n_ctx": 1024,
    "n_batch": 32,
    "n_ubatch": 32,
    "n_threads": 1,
    "n_threads_batch": 1,
    "verbose": False,
}
WINDOW = 24  # of the zoo's models
TOKENS = [3 + i * 7 % 90 for i in range(600)]
KVS = ("f16", "q8_0", "mixed:threshold=0,sinks=0", "mixed:threshold=16,group=8")


def logits(llm: Llama) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), (llm.n_vocab(),)).copy()


@pytest.mark.by_model
@pytest.mark.parametrize("kv", KVS)
@pytest.mark.parametrize("name", ["gemma2", "gemma4", "gpt-oss"])
def test_a_completion_goes_on_where_it_can(name: str, kv: str, zoo_path: Callable[[str], Path]) -> None:
    path, second = zoo_path(name), TOKENS[:200] + TOKENS[500:520]
    with (
        Llama(path, kv=kv, swa_full=False, **OPTIONS) as llm,
        Llama(path, kv=kv, swa_full=False, **OPTIONS) as fresh,
    ):
        llm.create_completion(TOKENS[:590], max_tokens=1, temperature=0.0)
        assert llm.kv.longest_cut(0, 200) < 200
        llm.create_completion(second, max_tokens=1, temperature=0.0)
        fresh.eval(second)
        got, expected = logits(llm), logits(fresh)
        assert np.abs(got - expected).max() < 0.1
        assert llm.kv.exact_tokens == llm.n_tokens >= len(second)


@pytest.mark.parametrize("kv", KVS)
def test_rows_that_are_missing_are_not_evaluated_without(kv: str, zoo_path: Callable[[str], Path]) -> None:
    with Llama(zoo_path("gemma2"), kv=kv, swa_full=False, **OPTIONS) as llm:
        llm.eval(TOKENS[:590])
        llm.n_tokens = 200
        with pytest.raises(MissingRowsError, match="it can go on at 0: set n_tokens"):
            llm.eval(TOKENS[:1])
        assert llm.kv.positions(0)[1] == 589
        llm.n_tokens = 590
        llm.eval(TOKENS[:1])
        assert llm.n_tokens == 591


@pytest.mark.parametrize("kv", KVS)
def test_swa_full_keeps_rows_while_cells_are_empty(kv: str, zoo_path: Callable[[str], Path]) -> None:
    options = {**OPTIONS, "n_seq_max": 3, "kv_unified": True}
    with Llama(zoo_path("gemma2"), kv=kv, swa_full=True, **options) as llm:
        llm.eval(TOKENS[:300])
        llm.kv.copy(0, 1)
        llm.kv.remove(0)
        for _ in range(3):
            llm.eval(TOKENS[:500])
            llm.kv.remove(0)
        assert all(llm.kv.longest_cut(1, n) == n for n in range(301))


def test_where_a_sequence_can_be_cut(zoo_path: Callable[[str], Path]) -> None:
    with Llama(zoo_path("gemma2"), kv="f16", swa_full=True, n_seq_max=2, kv_unified=True, **OPTIONS) as llm:
        address = _llama_cpp.address(llm.ctx)
        assert _core.find_cut(address, 0, 10) == (0, 0, 0, 10, True)
        llm.eval(TOKENS[:100])
        assert _core.find_cut(address, 0, 70) == (70, 70, 70, 70, True)
        assert _core.find_cut(address, 0, 170) == (100, 100, 100, 170, True)
        llm.kv.remove(0, 50, 51)
        assert llm.kv.longest_cut(0, 100) == 50  # all layers lack it
        full, window = (_core.find_cut(address, 0, n)[1:3] for n in (100, 60))
        assert full == (50, 100)  # its row is out of the window's sight
        assert window == (50, 50)


def test_a_state_is_where_it_stands(zoo_path: Callable[[str], Path]) -> None:
    with Llama(zoo_path("lfm2"), kv="f16", **OPTIONS) as llm:
        llm.eval(TOKENS[:100])
        assert llm.kv.longest_cut(0, 100) == 100
        assert llm.kv.longest_cut(0, 200) == 100
        assert llm.kv.longest_cut(0, 99) == 0
        llm.n_tokens = 50
        with pytest.raises(MissingRowsError):
            llm.eval([5])
