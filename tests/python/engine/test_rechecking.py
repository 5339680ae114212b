"""An engine compares stored rows with its model before it first uses them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.engine import Engine
from mixedkv.engine.connectors.store_connector import StoreConnector
from mixedkv.engine.schedule.contract import Observer
from mixedkv.kv.block import KVBlock
from mixedkv.store import Identity, KVStore
from support.engine.conversations import open_llama

pytestmark = pytest.mark.full

PROMPT = [1, *(40 + (np.arange(180) * 37) % 200).tolist()]


class Seen(Observer):
    def __init__(self) -> None:
        self.problems: list[str] = []
        self.failures: list[str] = []

    def rechecked(self, problem: str) -> None:
        self.problems.append(problem)

    def restore_failed(self, reason: str) -> None:
        self.failures.append(reason)


@pytest.fixture(scope="module", params=["f16", "mixed"])
def shared(request: pytest.FixtureRequest) -> Iterator[Llama]:
    with open_llama(request.param, n_ctx=1024, n_seq_max=4, kv_unified=True) as llm:
        yield llm


def _store(llm: Llama, folder: Path, *, wrong: bool) -> None:
    llm.kv.clear()
    llm.reset()
    llm.eval(PROMPT)
    block = llm.kv.export()
    with KVStore(folder) as store:
        store.put(Identity.of(llm), _turned(block) if wrong else block)


def _turned(block: KVBlock) -> KVBlock:
    """Every token has the row of the one before it, as if positions had been counted wrongly."""

    def rolled(rows: np.ndarray) -> np.ndarray:
        return np.roll(rows, 1, axis=0)

    groups = tuple(
        replace(
            group,
            layers=tuple(replace(each, k=rolled(each.k), k_hot=rolled(each.k_hot)) for each in group.layers),
        )
        for group in block.groups
    )
    return replace(block, groups=groups)


@pytest.mark.parametrize("wrong", [False, True])
def test_before_it_is_first_used(llm: Llama, tmp_path: Path, wrong: bool) -> None:
    with Engine(llm) as engine:
        answer = engine.submit(PROMPT, max_tokens=8, temperature=0.0)
        expected = answer.text
    _store(llm, tmp_path, wrong=wrong)
    seen = Seen()
    with Engine(llm, connector=StoreConnector(KVStore(tmp_path)), observer=seen) as engine:
        answer = engine.submit(PROMPT, max_tokens=8, temperature=0.0)
        assert answer.text == expected
        assert answer.job.exact
        assert (answer.job.n_cached or 0) == (0 if wrong else len(PROMPT) - 1)
        assert [bool(problem) for problem in seen.problems] == [wrong]
        assert seen.failures == (["wrong"] if wrong else [])
        stats = engine.connector_stats()
        assert stats is not None
        assert stats["n_wrong"] == wrong


def test_it_can_be_switched_off(llm: Llama, tmp_path: Path) -> None:
    _store(llm, tmp_path, wrong=True)
    connector = StoreConnector(KVStore(tmp_path, recheck=False))
    with Engine(llm, connector=connector) as engine:
        answer = engine.submit(PROMPT, max_tokens=2, temperature=0.0)
        assert answer.result()
        assert answer.job.n_cached == len(PROMPT) - 1
