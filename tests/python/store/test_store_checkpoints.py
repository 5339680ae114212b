"""Blocks with checkpoints in a store: found where they serve, refused when they are not what was written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from mixedkv import KVBlock, Llama
from mixedkv.kv.checkpoint import Checkpoint
from mixedkv.store import Identity, KVStore, key_from_file
from support.cache.harness import prompt, rel_rms

pytestmark = pytest.mark.full

TOKENS = prompt(200, seed=5)
KINDS: list[Any] = [("lfm2", "mixed"), ("mamba", "f16"), ("gemma2", "mixed"), ("llama-64", "mixed")]
KINDS += [("qwen35", "mixed"), ("qwen2vl", "mixed")]
TWINS = (("lfm2", "f16"), ("granite-hybrid", "mixed"), ("rwkv7", "f16"))
KINDS += [pytest.param(kind, marks=pytest.mark.nightly) for kind in TWINS]


def open_llama(path: Path, kv: str) -> Llama:
    return Llama(path, kv=kv, n_ctx=512, n_threads=1, swa_full=False, verbose=False)


def evaluated(llm: Llama) -> KVBlock:
    """All tokens, with a checkpoint at 120."""
    llm.reset()
    llm.kv.clear()
    llm.eval(TOKENS[:120])
    point = llm.kv.checkpoint()
    assert point is not None
    llm.eval(TOKENS[120:])
    block = llm.kv.export()
    return replace(block, checkpoints=(point, *block.checkpoints))


def logits(llm: Llama) -> np.ndarray:
    row = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    return np.ctypeslib.as_array(row, (llm.n_vocab(),)).copy()


@pytest.fixture(params=KINDS, ids="-".join)
def llm(request: pytest.FixtureRequest, zoo_path: Callable[[str], Path]) -> Any:
    with open_llama(zoo_path(request.param[0]), request.param[1]) as llm:
        yield llm


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_prefix_is_found_where_a_checkpoint_is(llm: Llama, tmp_path: Path, encrypted: bool) -> None:
    key = None
    if encrypted:
        (tmp_path / "key").write_bytes(bytes(range(32)))
        (tmp_path / "key").chmod(0o600)
        key = key_from_file(tmp_path / "key")
    identity = Identity.of(llm)
    with KVStore(tmp_path / "store", key=key) as store:
        store.put(identity, evaluated(llm))
    llm.kv.remove(0)
    llm.eval(TOKENS[:120])
    llm.eval(prompt(20, seed=6))
    want = logits(llm)
    with KVStore(tmp_path / "store", key=key) as store:
        restored = store.restore(llm, [*TOKENS[:150], *prompt(20, seed=7)], exact_only=True)
        assert (restored.n_tokens, restored.exact, restored.tier) == (120, True, "disk")
        assert llm.kv.exact_tokens == llm.n_tokens == 120
        llm.eval(prompt(20, seed=6))
        assert rel_rms(logits(llm), want) < 1e-3
        assert store.restore(llm, TOKENS).n_tokens == 200
        assert store.find(identity, TOKENS[:100], exact_only=True) is None


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_file_is_a_miss_with_a_reason(llm: Llama, tmp_path: Path, damage: str) -> None:
    with KVStore(tmp_path) as store:
        store.put(Identity.of(llm), evaluated(llm))
    (file,) = tmp_path.glob("v1/entries/**/*.safetensors")
    data = bytearray(file.read_bytes())
    if damage == "cut":
        del data[-64:]
    else:
        data[-64] ^= 1
    file.write_bytes(data)
    with KVStore(tmp_path) as store:
        restored = store.restore(llm, TOKENS)
        assert not restored.hit
        assert restored.reason


def test_another_models_checkpoint_is_not_found(llm: Llama, zoo_path: Callable[[str], Path]) -> None:
    with KVStore(None) as store, open_llama(zoo_path("qwen3"), "mixed") as other:
        store.put(Identity.of(llm), evaluated(llm))
        restored = store.restore(other, TOKENS)
        assert (restored.n_tokens, restored.reason[:7]) == (0, "unknown")


def test_a_checkpoint_under_a_wrong_identity_is_refused(zoo_path: Callable[[str], Path]) -> None:
    """Nothing of it is left in the context."""
    with open_llama(zoo_path("lfm2"), "f16") as llm, KVStore(None) as store:
        block = evaluated(llm)
        bad = [Checkpoint(n=p.n, first=p.first, state=p.state[:-4]) for p in block.checkpoints]
        store.put(Identity.of(llm), replace(block, checkpoints=tuple(bad)))
        restored = store.restore(llm, TOKENS)
        assert restored.reason.startswith("refused")
        assert llm.n_tokens == 0
        llm.eval(TOKENS)


def test_checkpoints_count_in_the_budget(llm: Llama) -> None:
    block = evaluated(llm)
    plain = replace(block, checkpoints=())
    assert block.nbytes == plain.nbytes + sum(point.nbytes for point in block.checkpoints)
    with KVStore(None) as store:
        store.put(Identity.of(llm), block)
        assert store.stats().bytes_ram == block.nbytes
