"""Rows that are not as most are: layers without values, padded values, layers without RoPE, full windows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mixedkv import KVBlock, Llama
from mixedkv.chunks.gate import last_logits
from mixedkv.engine.batch.batch import Batch
from mixedkv.errors import UnsupportedModelError
from mixedkv.store import KVStore
from support.cache.harness import prompt, rel_rms

pytestmark = pytest.mark.full

WINDOWS_FOR_ALL = True  # F16 rows for every sequence, whatever they take

TOKENS, NEXT = prompt(150, seed=3), prompt(30, seed=4)


def open_llama(path: Path, kv: str, **options: Any) -> Llama:
    return Llama(path, kv=kv, **{"n_ctx": 512, "n_threads": 1, "verbose": False, **options})


def go_on(llm: Llama, pos: int, seq: int = 0) -> np.ndarray:
    batch = Batch(len(NEXT))
    batch.add(NEXT, pos, seq, logits=True)
    assert batch.decode(llm.ctx) == 0
    return last_logits(llm)


@pytest.mark.parametrize("kv", ["f16", "q8_0", "mixed:cold=q8_0"])
def test_latent_rows_come_back(zoo_path: Callable[[str], Path], tmp_path: Path, kv: str) -> None:
    """MLA: one row for keys and values."""
    path = zoo_path("deepseek2")
    with open_llama(path, kv) as llm, open_llama(path, kv) as other, KVStore(tmp_path) as store:
        llm.eval(TOKENS)
        block = llm.kv.export()
        (group,) = block.groups
        assert [layer.head_size_v for layer in group.layers] == [0, 0]
        assert all(layer.v.size == layer.v_hot.size == 0 for layer in group.layers)
        assert store.save(llm).n_stored == len(TOKENS)
        assert store.restore(other, [*TOKENS, *NEXT], exact_only=True).n_tokens == len(TOKENS)
        assert np.array_equal(go_on(other, len(TOKENS)), go_on(llm, len(TOKENS)))
        with pytest.raises(LookupError, match="MLA"):
            llm.kv.layer(0).v()
        other.kv.clear()
        if kv == "q8_0":
            assert not other.kv.can_shift
            with pytest.raises(ValueError, match="cannot shift"):
                other.kv.load(block, at=9)
            with pytest.raises(UnsupportedModelError, match="cannot be moved"):
                llm.kv.shift(0, 0, -1, 9)
            return
        other.kv.load(KVBlock.from_arrays(block.describe(), block.to_arrays()), at=9)
        with open_llama(path, "f16") as there:
            batch = Batch(len(TOKENS))
            batch.add(TOKENS, 9, 0, logits=True)
            assert batch.decode(there.ctx) == 0
            near = 1e-3 if kv == "f16" else 0.02
            keys = [x.kv.layer(1).k(basis="model") for x in (other, there)]
            assert rel_rms(*keys) < near
            assert rel_rms(go_on(other, 9 + len(TOKENS)), go_on(there, 9 + len(TOKENS))) < near


def test_padded_values_come_back(zoo_path: Callable[[str], Path]) -> None:
    """Without flash attention llama.cpp gives V of all layers the columns of the widest."""
    path, options = zoo_path("gemma4"), {"swa_full": True}
    with open_llama(path, "f16", **options) as llm, open_llama(path, "f16", **options) as other:
        llm.eval(TOKENS)
        block = llm.kv.export()
        assert len({layer.v.shape for group in block.groups for layer in group.layers}) == 2
        other.kv.load(block)
        assert np.array_equal(go_on(other, len(TOKENS)), go_on(llm, len(TOKENS)))


@pytest.mark.parametrize("kv", ["f16", "mixed:cold=q8_0"])
def test_layers_without_rope_are_not_turned(zoo_path: Callable[[str], Path], kv: str) -> None:
    """Scores are those of relative positions, so they are the same at another place."""
    path = zoo_path("llama4")
    with open_llama(path, kv, swa_full=True) as llm, open_llama(path, kv, swa_full=True) as moved:
        llm.eval(TOKENS)
        moved.kv.load(llm.kv.export(), at=64)
        assert rel_rms(go_on(moved, 64 + len(TOKENS)), go_on(llm, len(TOKENS))) < 0.02
        (keys, turned), (others, also) = ((x.kv.layer(3).k(), x.kv.layer(0).k()) for x in (llm, moved))
        n = len(TOKENS)
        assert rel_rms(others[:n], keys[:n]) < 0.01
        assert rel_rms(also[:n], turned[:n]) > 0.5


def test_windows_make_room_for_each_other(zoo_path: Callable[[str], Path]) -> None:
    """Layers with a sliding window keep rows that nobody sees until a checkpoint needs their cells."""
    shape = {"n_seq_max": 4, "kv_unified": True, "swa_full": False, "n_ubatch": 32, "n_ctx": 1024}
    with open_llama(zoo_path("gemma2"), "mixed", **shape) as llm:
        batch = Batch(512)

        def evaluate(seq: int, pos: int, n: int) -> None:
            batch.clear()
            batch.add(prompt(n, seed=seq), pos, seq, logits=False)
            assert batch.decode(llm.ctx) == 0

        evaluate(0, 0, 100)
        point = llm.kv.checkpoint(0)
        assert point is not None
        for seq in (0, 1, 2):
            evaluate(seq, 100 if seq == 0 else 0, 32)
        llm.kv.resume(point, 100, 0, 3)
        assert llm.kv.positions(3)[1] == 99
        for seq in (0, 1, 2):
            assert llm.kv.holds(seq, 132 if seq == 0 else 32)


@pytest.mark.parametrize("kv", ["f16", "mixed:cold=q8_0"])
def test_filling_a_gap_takes_no_cells_of_sliding_windows(zoo_path: Callable[[str], Path], kv: str) -> None:
    """What the end of a sequence does not see any more is read by tokens that are evaluated before it."""
    with open_llama(zoo_path("gemma2"), kv, swa_full=True) as llm:
        llm.eval(TOKENS)
        before = [llm.kv.layer(il).k() for il in (0, 1)]
        llm.kv.remove(0, 50, 60)
        llm.kv.fill(TOKENS[50:60], range(50, 60))
        for il in (0, 1):
            assert llm.kv.layer(il).positions().tolist() == list(range(len(TOKENS)))
            assert rel_rms(llm.kv.layer(il).k(), before[il]) < 0.01
