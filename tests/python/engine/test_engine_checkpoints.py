"""Prompts that begin alike, on an engine: what is not evaluated again, and that nothing changes by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mixedkv import Llama
from mixedkv.bundled.corpus import make_recall
from mixedkv.engine import Engine, StoreConnector
from mixedkv.engine.checkpoints import CheckpointLimits, places
from mixedkv.store import KVStore
from support.harness import prompt
from support.server_support import Direct

GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "logit_bias": ((2, -100.0),)}
KINDS = [
    ("llama-64", "mixed:hot_budget=all"),
    ("gemma2", "mixed:hot_budget=all"),
    ("lfm2", "f16"),
    ("lfm2", "mixed:hot_budget=all"),
    ("mamba", "f16"),
]


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
    mixed, f16 = cached("mixed:hot_budget=all"), cached("f16")
    assert mixed[0] == f16[0] == 0
    assert mixed[1] == f16[1] > 300
    assert mixed[2:4] == f16[2:4]
    assert 0 <= f16[4] - mixed[4] <= 16


class Served:
    """An engine on a model of the zoo."""

    def __init__(self, path: Path, kv: str, store: Path | None = None, **options: Any) -> None:
        shape: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 8, "kv_unified": True, "n_threads": 1}
        self.llm = Llama(path, kv=kv, swa_full=False, verbose=False, **shape)
        connector = StoreConnector(KVStore(store)) if store else None
        self.engine = Engine(self.llm, connector=connector, **options)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.llm.close()

    def answer(self, tokens: list[int], **options: Any) -> tuple[int, list[int]]:
        """Tokens that were not evaluated, and the answer's ids."""
        answer = self.engine.submit(tokens, **{**GREEDY, **options})
        answer.result(60)
        job = answer.job
        assert job.exact
        return job.n_cached or 0, list(job.tokens[job.n_prompt :])


TURNS = [prompt(60, seed=i) for i in range(6)]


def converse(served: Served, n: int = 6) -> list[tuple[list[int], int, list[int]]]:
    """Turns whose answers become part of the next prompt: prompt, cached tokens and answer of each."""
    history: list[int] = []
    turns = []
    for turn in TURNS[:n]:
        history = [*history, *turn]
        n_cached, ids = served.answer(history)
        turns.append((history, n_cached, ids))
        history = [*history, *ids]
    return turns


@pytest.mark.parametrize(("name", "kv"), KINDS)
def test_conversations_go_on_from_checkpoints(
    zoo_path: Callable[[str], Path], tmp_path: Path, name: str, kv: str
) -> None:
    """Six turns, again, an edit in the middle; then all of it in another engine, from the disk."""
    with Served(zoo_path(name), kv, tmp_path) as served:
        turns = converse(served)
        for i, (tokens, n_cached, ids) in enumerate(turns):
            assert n_cached >= (len(turns[i - 1][0]) if i else 0)
            assert served.answer(tokens, reuse=False) == (0, ids)
            assert served.answer(tokens) == (len(tokens) - 1, ids)
        third = turns[2][0]
        edited = [*third[:-10], *prompt(30, seed=77)]
        n_cached, want = served.answer(edited)
        assert len(turns[1][0]) - 1 <= n_cached < len(third)
        assert served.answer(edited, reuse=False)[1] == want
        assert served.engine.pool.checkpoints
    with Served(zoo_path(name), kv, tmp_path) as served:
        for tokens, _, ids in turns[1:4]:
            n_cached, got = served.answer(tokens)
            assert n_cached >= len(tokens) - 61
            assert got == ids
        n_cached, got = served.answer([*third[:-10], *prompt(30, seed=78)])
        assert n_cached >= len(turns[1][0]) - 1


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
