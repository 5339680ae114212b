"""What another process stored is compared with the model before it is believed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.kv.block import KVBlock, LayerRows
from mixedkv.store import Identity, KVStore
from support.engine.conversations import empty, open_llama

pytestmark = pytest.mark.full

TOKENS = np.array([1, *(40 + (np.arange(180) * 37) % 200)], np.int32)


@pytest.fixture(scope="module", params=["f16", "mixed", "mixed:cold=q8_0"])
def shared(request: pytest.FixtureRequest) -> Iterator[Llama]:
    with open_llama(request.param, n_ctx=512) as llm:
        yield llm


def _changed(block: KVBlock, change: Callable[[LayerRows], LayerRows]) -> KVBlock:
    groups = tuple(replace(group, layers=tuple(map(change, group.layers))) for group in block.groups)
    return replace(block, groups=groups)


def _store(llm: Llama, folder: Path, change: Callable[[LayerRows], LayerRows] | None = None) -> None:
    """Evaluate the tokens, and keep them as another process would; with damage that no checksum shows."""
    llm.eval(TOKENS.tolist())
    block = llm.kv.export()
    with KVStore(folder, max_ram_bytes=0) as store:
        store.put(Identity.of(llm), block if change is None else _changed(block, change))
    empty(llm)


def _of_other_tokens(layer: LayerRows) -> LayerRows:
    rolled: dict[str, Any] = {
        name: np.roll(getattr(layer, name), 1, axis=0) for name in ("k", "v", "k_hot", "v_hot")
    }
    return replace(layer, **rolled)


def _no_deep_values(layer: LayerRows) -> LayerRows:
    if layer.il == 0:
        return layer
    return replace(layer, v=np.zeros_like(layer.v), v_hot=np.zeros_like(layer.v_hot))


def test_sound_entries_are_believed_after_a_look(llm: Llama, tmp_path: Path) -> None:
    _store(llm, tmp_path)
    with KVStore(tmp_path) as store:
        for n_rechecked in (1, 1):  # the second time it is believed
            restored = store.restore(llm, TOKENS)
            assert (restored.n_tokens, restored.exact, restored.reason) == (len(TOKENS), True, "")
            assert llm.kv.exact_tokens == len(TOKENS)
            assert store.stats().n_rechecked == n_rechecked
        restored_rows = llm.kv.export().to_arrays()
    empty(llm)
    with KVStore(tmp_path, recheck=False) as store:
        assert store.restore(llm, TOKENS).n_tokens == len(TOKENS)
        assert store.stats().n_rechecked == 0
    for name, array in llm.kv.export().to_arrays().items():  # the look has changed nothing
        assert np.array_equal(array, restored_rows[name]), name


@pytest.mark.parametrize("damage", [_of_other_tokens, _no_deep_values])
def test_wrong_entries_are_removed_and_named(
    llm: Llama, tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _store(llm, tmp_path, damage)
    with KVStore(tmp_path) as store, caplog.at_level(logging.ERROR, "mixedkv.store"):
        restored = store.restore(llm, TOKENS)
        assert restored.n_tokens == 0
        assert restored.reason.startswith("wrong: ")
        assert llm.kv.positions(0) == (-1, -1)
        assert store.entries() == []
        assert (store.stats().n_wrong, store.stats().misses) == (1, {"wrong": 1})
        assert Identity.of(llm).digest.hex() in caplog.text


def test_what_this_process_stored_is_believed(llm: Llama, tmp_path: Path) -> None:
    llm.eval(TOKENS.tolist())
    with KVStore(tmp_path) as store:
        store.save(llm)
        empty(llm)
        assert store.restore(llm, TOKENS).hit
        assert store.stats().n_rechecked == 0


def test_layers_that_store_no_values(zoo_path: Callable[[str], Path], tmp_path: Path) -> None:
    """Each restore was refused."""
    with Llama(zoo_path("deepseek2"), kv="mixed", n_ctx=512, n_threads=2, verbose=False) as llm:
        _store(llm, tmp_path)
        with KVStore(tmp_path) as store:
            restored = store.restore(llm, TOKENS)
            assert (restored.n_tokens, restored.reason) == (len(TOKENS), "")
            assert store.stats().n_rechecked == 1
