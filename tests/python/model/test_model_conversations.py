"""Conversations with every kind of model: cold, from the context, from the disk in a new process, edited."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.cache.harness import prompt
from support.models import zoo
from support.servers.served_models import N_NEW, N_TURN, Answered, Served, converse, in_new_process, questions

pytestmark = pytest.mark.full

WINDOWS_FOR_ALL = True  # F16 rows for every sequence, whatever they take

MIXED = "mixed"
F16_ONLY = ("mamba", "rwkv7")
KINDS = [(name, "f16" if name in F16_ONLY else MIXED) for name in zoo.KINDS if name != "bert"]
SENSITIVE = ("gemma4",)  # its random weights make a hundred times more of a rounding, in F16 too
N_KINDS = len(KINDS)  # what follows is one of these with another cache
KINDS += [("qwen35", "f16"), ("lfm2", "f16"), ("qwen2vl", "f16"), ("gemma3", "f16"), ("deepseek2", "f16")]
FULL = "swa_full "  # before a cache: sliding layers keep all rows, as a server has it
KINDS += [(name, FULL + MIXED) for name in ("gemma2", "gemma3", "gemma4", "gpt-oss")]


def talk(path: Path, kv: str, store: Path, seed: int) -> tuple[dict[str, Any], list[Answered]]:
    """One conversation: what a new process is asked, and what it should answer."""
    n_ctx = 4096 if path.stem == "llama4" else 1024  # each sequence has rows of all tokens in its chunks
    options: dict[str, Any] = {"n_ctx": n_ctx, "swa_full": kv.startswith(FULL)}
    kv = kv.removeprefix(FULL)
    with Served(path, kv, store, **options) as served:
        done = converse(served, questions(seed))
        distances = []
        for i, (tokens, answer) in enumerate(done):
            # evaluated is what is new since the last checkpoint, which is at the end of the last prompt
            assert len(tokens) - answer.cached <= (N_TURN + N_NEW + 1 if i else N_TURN)
            cold = served.ask(tokens, reuse=False)
            assert cold.cached == 0
            assert answer.same(cold)
            distances.append(answer.distance(cold))
            again = served.ask(tokens)
            assert again.cached == len(tokens) - 1
            assert again.same(cold)
        assert np.median(distances) < (0.1 if path.stem in SENSITIVE else 0.02)
        tokens, answer = done[-1]
        served.forget()
        restored = served.ask(tokens)
        assert restored.tier == "ram"
        assert restored.same(answer)
        assert len(tokens) - restored.cached <= N_TURN + N_NEW + 30
        edited = [*done[2][0][:-10], *prompt(30, seed=100 * seed + 77)]
        answer = served.ask(edited)
        assert len(done[1][0]) - 1 <= answer.cached < len(done[2][0])
        cold = served.ask(edited, reuse=False)
        assert answer.same(cold)
        if not served.engine.pool.rule.anywhere:
            assert sum(point.nbytes for point in served.engine.pool.checkpoints) > 0
    done.insert(0, (edited, cold))  # first, when nothing is live
    prompts = [tokens for tokens, _ in done]
    task = {"path": str(path), "kv": kv, "options": options, "store": str(store), "prompts": prompts}
    return task, [answer for _, answer in done]


def check_restored(task: dict[str, Any], answers: list[Answered], expected: list[Answered]) -> None:
    for tokens, answer, want in zip(task["prompts"], answers, expected, strict=True):
        assert answer.same(want)
        assert len(tokens) - answer.cached <= N_TURN + N_NEW + 30


@pytest.fixture(scope="module")
def talks(zoo_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """One conversation with each kind, had once."""

    @cache
    def talk_with(name: str, kv: str) -> tuple[dict[str, Any], list[Answered]]:
        return talk(zoo_path(name), kv, tmp_path_factory.mktemp("store"), 1)

    return talk_with


@pytest.mark.by_model
@pytest.mark.parametrize(
    ("name", "kv"),
    [*KINDS[:N_KINDS], *(pytest.param(*kind, marks=pytest.mark.nightly) for kind in KINDS[N_KINDS:])],
)
def test_a_conversation(talks: Callable[..., Any], name: str, kv: str) -> None:
    talks(name, kv)


@pytest.mark.nightly
def test_all_of_them_from_the_disk_in_a_new_process(talks: Callable[..., Any]) -> None:
    had = [talks(name, kv) for name, kv in KINDS]
    for answers, (task, expected) in zip(in_new_process([task for task, _ in had]), had, strict=True):
        check_restored(task, answers, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kv"), KINDS)
def test_many_conversations(zoo_path: Callable[[str], Path], tmp_path: Path, name: str, kv: str) -> None:
    """Fifty with CONVERSATIONS=50, which takes a minute a kind."""
    n = int(os.environ.get("CONVERSATIONS", "5"))
    had = [talk(zoo_path(name), kv, tmp_path / str(seed), seed) for seed in range(n)]
    for answers, (task, expected) in zip(in_new_process([task for task, _ in had]), had, strict=True):
        check_restored(task, answers, expected)
