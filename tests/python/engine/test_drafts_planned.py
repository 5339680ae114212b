"""Which drafts are made, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mixedkv.config import parse_kv
from mixedkv.engine.draft.sources import SOURCES, Source
from mixedkv.engine.draft.speculation import Speculation, StepTime
from mixedkv.engine.jobs.drafter import Drafter
from mixedkv.engine.schedule.contract import Observer, Run, StepPlan
from mixedkv.prompts.prompt_lookup import PromptLookup

pytestmark = pytest.mark.full


def after(tokens: str, prediction: str = "", most: int = 8) -> str:
    lookup = PromptLookup(map(ord, tokens), map(ord, prediction))
    return "".join(map(chr, lookup.draft(most)))


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ("", ""),
        ("abc", ""),
        ("abcdefabc", "defabcde"),
        ("abc1 abc2 abc", "2 abc2 a"),  # the latest one
        ("xyxyxy", "xyxyxyxy"),
        ("aaaa", "aaaaaaaa"),
        ("the cat sat. the cat", " sat. th"),
    ],
)
def test_what_followed_before_is_the_draft(tokens: str, drafts: str) -> None:
    assert after(tokens) == drafts


def test_a_prediction_comes_first_and_is_found_again() -> None:
    assert after("say it: ", "one two three") == "one two "
    assert after("one 1 one ", "one two three") == "one two "
    lookup = PromptLookup(map(ord, "say it: "), map(ord, "one two three"))
    for letter in "uno two":
        lookup.add(ord(letter))
    assert "".join(map(chr, lookup.draft(6))) == " three"


def test_a_copy_goes_its_own_way() -> None:
    drafter = Drafter({"lookup": PromptLookup(map(ord, "abcdefabc"))})
    copy = drafter.copy()
    for letter in "xxx":
        drafter.take(ord(letter))
    assert copy.draft(3)[0] == list(map(ord, "def"))


def test_guesses_are_counted_without_being_tried() -> None:
    drafter = Drafter({"lookup": PromptLookup([1, 2, 3, 4] * 3)})
    for token in [1, 2, 3, 4] * 5:
        drafter.take(token)
    good = drafter.draft(4)[1]
    for token in [5, 6, 5, 6] * 5:
        drafter.take(token)
    again = drafter.draft(4)[1]
    for token in [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3, 7, 1, 2, 3]:
        drafter.take(token)
    assert good > 0.9
    assert again > 0.9
    assert drafter.draft(4)[1] < again


class Fixed(Drafter):
    """Offers as many drafts as there may be, and says how likely they are."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._rate = rate

    def draft(self, most: int, certain: object = ()) -> tuple[list[int], float]:
        return list(certain)[:most] or [7] * most, self._rate  # type: ignore[call-overload]


def speculation(kv: str = "mixed", n_batch: int = 512) -> Speculation:
    llm: Any = SimpleNamespace(
        kv=SimpleNamespace(can_cut=True, config=parse_kv(kv)),
        n_batch=n_batch,
        context_params=SimpleNamespace(n_ubatch=n_batch),
        n_ctx=lambda: 4096,
    )
    return Speculation(llm, "prompt-lookup", Observer())


def a_run(rate: float, left: int = 100) -> Run[Any]:
    """A run of an answer whose drafts are accepted at this rate."""
    answer = SimpleNamespace(drafter=Fixed(rate), sampler=SimpleNamespace(certain=list), thought=None)
    job: Any = SimpleNamespace(
        answer=answer,
        request=SimpleNamespace(max_tokens=left + 1),
        n_answer=1,
        tokens=[1] * 50,
        alone=False,
    )
    return Run(job, 1, chooses=True)


def drafted(spec: Speculation, rates: list[float], n_prompt: int = 0, left: int = 100) -> list[int]:
    """How many drafts each of some answers gets."""
    runs = [a_run(rate, left) for rate in rates]
    step = StepPlan(runs, len(runs), n_prompt)
    spec.plan(step)
    assert step.n_drafts == sum(len(run.drafts) for run in runs)
    return [len(run.drafts) for run in runs]


def measure(spec: Speculation, n_streams: int, alone: float, each: float) -> None:
    for i in range(100):
        n = i % 5
        spec.took(StepPlan([], n_streams, 0, n), alone + n * each)


def test_what_drafts_cost_is_measured() -> None:
    time = StepTime(1)
    for i in range(60):
        time.observe(i % 4, 1.0 if i == 50 else 0.010 + 0.002 * (i % 4))
    alone, each = time.line()
    assert alone == pytest.approx(0.010, rel=0.3)
    assert each == pytest.approx(0.002, rel=0.5)


def test_likely_drafts_of_a_step_that_reads_weights() -> None:
    spec = speculation()
    measure(spec, 1, 0.010, 0.0005)
    assert drafted(spec, [0.98]) == [16]
    few = drafted(spec, [0.5])[0]
    assert 1 <= few <= 6
    assert drafted(spec, [0.01]) == [0]


def test_none_where_a_token_costs_what_it_gives() -> None:
    """As with many answers, and where a step computes all it can."""
    spec = speculation()
    measure(spec, 8, 0.080, 0.010)
    assert drafted(spec, [0.9] * 8) == [0] * 8
    measure(spec, 1, 0.010, 0.010)
    assert drafted(spec, [0.9]) == [0]


def test_the_likelier_ones_of_several_answers_come_first() -> None:
    spec = speculation()
    measure(spec, 3, 0.010, 0.001)
    a, b, c = drafted(spec, [0.98, 0.85, 0.05])
    assert a > b > c == 0


def test_bounds() -> None:
    """Of the window, of the answer, of the batch; none beside prompts nor before a step was measured."""
    assert drafted(speculation(), [0.98]) == [0]
    for kv in ("f16", "mixed"):
        spec = speculation(kv)
        measure(spec, 1, 0.010, 0.0001)
        assert drafted(spec, [0.98]) == [16]
        assert drafted(spec, [0.98], left=3) == [2]
        assert drafted(spec, [0.98], left=1) == [0]
        assert drafted(spec, [0.98], n_prompt=1) == [0]
    spec = speculation(n_batch=32)
    measure(spec, 3, 0.010, 0.0001)
    assert sum(drafted(spec, [0.98] * 3)) == 29


class Sevens:
    """Guesses that 7 comes next, again and again."""

    def __init__(self, prompt: object = (), prediction: object = ()) -> None:
        self.added: list[int] = []

    def add(self, token: int) -> None:
        self.added.append(token)

    def draft(self, most: int) -> list[int]:
        return [7] * most

    def copy(self) -> Sevens:
        return Sevens()


def test_the_guesses_that_were_right_are_drafted() -> None:
    drafter = Drafter({"sevens": Sevens(), "lookup": PromptLookup([])})
    for token in [1, 2, 3, 4] * 2:
        drafter.take(token)
    assert drafter.draft(2)[0] == [1, 2]  # sevens were wrong each time
    for token in [8, 9]:  # nothing was ever behind these
        drafter.take(token)
    assert drafter.draft(2)[0] == [7, 7]
    assert drafter.draft(2, [5])[0] == [5]  # what is certain comes first


def test_a_source_is_a_line_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = speculation()
    with pytest.raises(ValueError, match="speculation='sevens': use one of off, prompt-lookup, draft-model"):
        spec.drafter([1], "sevens")
    monkeypatch.setitem(SOURCES, "sevens", Source(guesses=Sevens))
    monkeypatch.setitem(SOURCES, "nines", Source(certain=lambda answer: [9]))
    drafter = spec.drafter([1], "sevens")
    assert drafter is not None
    assert drafter.draft(3)[0] == [7, 7, 7]
    plain = spec.drafter([1], "prompt-lookup")
    assert plain is not None
    assert plain.draft(3)[0] == []  # in its own mode only
    measure(spec, 1, 0.010, 0.0005)
    step = StepPlan([a_run(0.1)], 1)
    spec.plan(step)
    assert step.runs[0].drafts == [9]
    with pytest.raises(ValueError, match="use one of"):
        spec.drafter([1], "nines")  # nothing that a request asks for


def test_a_prediction_is_drafted_in_any_mode() -> None:
    spec = speculation()
    assert spec.drafter([1], "off") is None
    assert spec.drafter([1], "off", [4]) is not None
    assert spec.drafter([1]) is not None
