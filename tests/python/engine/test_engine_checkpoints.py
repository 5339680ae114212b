"""Prompts that begin alike, on an engine: what is not evaluated again, and that nothing changes by it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mixedkv._core import HotWindow
from mixedkv.bundled.corpus import make_recall
from mixedkv.config.cut_rule import CutRule
from mixedkv.engine import StoreConnector
from mixedkv.engine.connectors.store_connector import StoredRows
from mixedkv.prefix.checkpoints import CheckpointLimits, places
from mixedkv.store import KVStore
from support.cache.harness import prompt
from support.patience import PATIENCE
from support.servers.served_models import Served
from support.servers.server import Direct, end_of

pytestmark = pytest.mark.full

WINDOWS_FOR_ALL = True  # F16 rows for every sequence, whatever they take


def chat(*messages: str) -> str:
    roles = ("user", "assistant")
    turns = "".join(f"<|{roles[i % 2]}|>{text}<|end|>" for i, text in enumerate(messages))
    return turns + "<|assistant|>"


def cached(kv: str) -> list[int]:
    """Cached tokens of a prompt, of it again, with other questions, and with another answer before them."""
    journal = " ".join(make_recall(61, 40).journal)
    prompts = [
        chat(journal, "ok", "Question: What is the code of the mill?"),
        chat(journal, "ok", "Question: What is the code of the mill?"),
        chat(journal, "ok", "Who keeps the keys of the tower?"),
        chat(journal, "ok", "Question: Where is the red boat?"),
        chat(journal, "yes", "Question: What is the code of the mill?"),
    ]
    with Direct(kv=kv) as direct:
        found = []
        for text in prompts:
            job, _ = direct.answer(
                text, 40, ignore_end=True
            )  # so long that no F16 copy of the prompt is left
            cold, _ = direct.answer(text, 40, ignore_end=True, reuse=False)
            assert job.exact
            assert cold.n_cached == 0
            n = job.n_prompt + 12
            assert job.tokens[:n] == cold.tokens[:n]
            found.append(job.n_cached or 0)
    return found


def test_a_mixed_cache_shares_what_an_f16_cache_shares() -> None:
    mixed, f16 = cached("mixed"), cached("f16")
    assert mixed[0] == f16[0] == 0
    assert mixed[1] == f16[1] > 300
    assert mixed[2:4] == f16[2:4]
    assert 0 <= f16[4] - mixed[4] <= 16


def test_a_chat_that_begins_when_another_ends_has_its_window() -> None:
    """In a context that has F16 rows for hardly more than one of them."""
    with Direct(kv="mixed", n_ctx=768, parallel=1, idle=7) as direct:
        for seed in range(5):
            journal = " ".join(make_recall(500 + seed, 20).journal)
            first, _ = direct.answer(chat(journal), 8, ignore_end=True)
            more = direct.tokens("<|end|>" + chat("Who keeps the keys?"))
            second, _ = direct.answer([*first.tokens, *more], 8, ignore_end=True)
            assert first.exact, seed
            assert second.n_cached == len(first.tokens) - 1, seed


def test_what_is_stored_has_its_window_though_others_have_taken_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat's KV is stored beside the next ones' prompts: all have cells, and one at a time F16 rows."""
    ended, put = threading.Event(), StoredRows.put

    def put_late(*args: Any) -> int:
        assert ended.wait(PATIENCE)
        return put(*args)

    monkeypatch.setattr(StoredRows, "put", put_late)
    options: dict[str, Any] = {"kv": "mixed", "n_ctx": 768, "parallel": 1, "idle": 7}
    prompts = [chat(" ".join(make_recall(500 + seed, 20).journal)) for seed in range(3)]
    with Direct(**options, connector=StoreConnector(KVStore(tmp_path))) as direct:
        jobs = [direct.start(text, 8, ignore_end=True) for text in prompts]
        firsts = [job for job, events in jobs if end_of(events)]
        ended.set()
    with Direct(**options, connector=StoreConnector(KVStore(tmp_path))) as direct:
        more = direct.tokens("<|end|>" + chat("Who keeps the keys?"))
        for first in firsts:
            second, _ = direct.answer([*first.tokens, *more], 8)
            assert first.exact
            assert second.exact
            assert second.n_cached == len(first.tokens) - 1


def test_a_step_does_not_end_a_few_tokens_behind_the_last_turn() -> None:
    """So a short message is evaluated in one step, and said anew it begins where the last answer ended."""
    rule = CutRule(HotWindow(threshold=32, group_size=16, sink_tokens=4))
    assert places(rule, CheckpointLimits(), [0, 402, 421], 400, 424) == [400, 424]
    assert places(rule, CheckpointLimits(), [0, 402, 441, 480], 400, 484)[0] == 400
    assert 402 not in places(rule, CheckpointLimits(), [0, 402, 441, 480], 400, 484)


def test_checkpoints_can_be_turned_off(zoo_path: Callable[[str], Path]) -> None:
    with Served(zoo_path("lfm2"), "f16", checkpoints=CheckpointLimits(per_sequence=0)) as served:
        tokens = prompt(100, seed=1)
        ids = served.answer(tokens)[1]
        assert served.answer(tokens) == (0, ids)
        assert served.engine.pool.checkpoints == []


def test_checkpoints_are_taken_on_the_way(zoo_path: Callable[[str], Path]) -> None:
    limits = CheckpointLimits(every=64)
    with Served(zoo_path("mamba"), "f16", checkpoints=limits) as served:
        tokens = prompt(300, seed=1)
        served.answer(tokens)
        assert served.answer([*tokens[:200], *prompt(50, seed=2)])[0] == 192
        rule = served.engine.pool.rule
        assert places(rule, limits, [], 0, 300) == [64, 128, 192, 256, 299]


@pytest.mark.parametrize("field", ["per_sequence", "every", "max_bytes"])
def test_limits_are_not_negative(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        CheckpointLimits(**{field: -1})
