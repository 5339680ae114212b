"""Drafts of hybrid models: what is rejected is taken back to a snapshot of the state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mixedkv.engine.draft.speculation import StepTime
from mixedkv.engine.jobs.drafter import Drafter
from support.servers.served_models import Answered, Served, questions

pytestmark = pytest.mark.full

WINDOWS_FOR_ALL = True  # F16 rows for every sequence, whatever they take

N_RS_SEQ = 4


class Known(Drafter):
    """Knows the answer and says some of it, often with a wrong token somewhere."""

    def __init__(self, answer: list[int], seed: int) -> None:
        super().__init__()
        self._answer, self._at, self._random = answer, 0, np.random.default_rng(seed)

    def draft(self, most: int, certain: object = ()) -> tuple[list[int], float]:
        drafts = self._answer[self._at : self._at + max(0, most)]
        if drafts and self._random.random() < 0.6:
            drafts[int(self._random.integers(len(drafts)))] = int(self._random.integers(10, 200))
        return drafts, 0.98

    def take(self, token: int) -> None:
        self._at += 1


@pytest.fixture(autouse=True)
def _drafts_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTime, "line", lambda _: (1.0, 0.001))


def two_turns(served: Served, known: list[list[int]]) -> list[Answered]:
    """Answers to four prompts at a time, and to each with its answer and another question behind it."""
    answers: list[Answered] = []
    histories, more = questions(7, 4), questions(8, 4)
    for turn in range(2):
        drafters = iter(Known(ids, seed) for seed, ids in enumerate(known[4 * turn : 4 * turn + 4]))
        served.engine.speculation.drafter = lambda *_, left=drafters: next(left, None)  # type: ignore
        found = served.ask_all(histories)
        answers += found
        histories = [
            [*history, *answer.ids, *question]
            for history, answer, question in zip(histories, found, more, strict=True)
        ]
    return answers


@pytest.mark.by_model
@pytest.mark.parametrize("kv", ["f16", "mixed:threshold=24,group=8"])
@pytest.mark.parametrize("name", ["lfm2", "qwen35", "nemotron-h"])
def test_answers_are_those_without(zoo_path: Callable[[str], Path], name: str, kv: str) -> None:
    with Served(zoo_path(name), kv) as served:
        plain = two_turns(served, [])
        assert served.engine.speculation.why_off.endswith("n_rs_seq only")
    with Served(zoo_path(name), kv, n_rs_seq=N_RS_SEQ) as served:
        drafted = two_turns(served, [answer.ids for answer in plain])
        stats = served.engine.speculation.stats()
        assert 8 < int(stats["accepted_tokens"]) < int(stats["drafted_tokens"]) - 8
    assert all(a.same(b) for a, b in zip(drafted, plain, strict=True))
    assert [a.cached for a in drafted] == [a.cached for a in plain]
    assert all(answer.cached > 50 for answer in drafted[4:])


def test_one_step_back_is_enough_for_drafts(zoo_path: Callable[[str], Path]) -> None:
    with Served(zoo_path("lfm2"), "mixed", n_rs_seq=1) as served:
        assert not served.engine.speculation.why_off
