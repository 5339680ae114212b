"""Answers with drafts are the answers without, whatever is drafted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.bundled.corpus import make_recall
from mixedkv.constrain.constraint_text import Constraint
from mixedkv.engine import Answer, Engine
from mixedkv.engine.draft.speculation import StepTime
from mixedkv.engine.jobs.drafter import Drafter
from mixedkv.engine.jobs.job import Done, Job
from mixedkv.engine.sample.sampling import Sampling
from mixedkv.engine.schedule.request import Request
from mixedkv.engine.text.thought import ThoughtTags
from support.servers.server import Direct, end_of

pytestmark = pytest.mark.full

WINDOWS_FOR_ALL = True  # F16 rows for every sequence, whatever they take

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["green", "blue"]}, "place": {"const": "the mill behind the house"}},
    "required": ["colour", "place"],
    "additionalProperties": False,
}
CONSTRAINT = Constraint("json_schema", json.dumps(SCHEMA))


@pytest.fixture(autouse=True)
def _drafts_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else this machine does."""
    monkeypatch.setattr(StepTime, "line", lambda _: (1.0, 0.001))


class Half(Drafter):
    """Knows the answer and says it half of the time, else nonsense: drafts of all lengths."""

    def __init__(self, job: Job, answer: list[int], seed: int = 0) -> None:
        super().__init__()
        self._job, self._answer, self._random = job, answer, np.random.default_rng(seed)

    def draft(self, most: int, certain: object = ()) -> tuple[list[int], float]:
        at = self._job.n_answer
        drafts = self._answer[at : at + int(self._random.integers(0, most + 1))] if most > 0 else []
        if drafts and self._random.random() < 0.5:
            drafts[int(self._random.integers(len(drafts)))] = int(self._random.integers(10, 200))
        return drafts, 0.98

    def take(self, token: int) -> None:
        pass


class Always(Drafter):
    """Drafts what it was given, after any token."""

    def __init__(self, drafts: list[int]) -> None:
        super().__init__()
        self._drafts = drafts

    def draft(self, most: int, certain: object = ()) -> tuple[list[int], float]:
        return self._drafts[: max(0, most)], 0.98


@pytest.fixture(
    scope="module", params=["mixed:threshold=64,group=16", pytest.param("f16", marks=pytest.mark.nightly)]
)
def direct(request: pytest.FixtureRequest) -> Iterator[Direct]:
    with Direct(kv=request.param) as direct:
        yield direct


def answer_with_drafts(direct: Direct, prompt: Any, true: Job, **options: Any) -> tuple[Job, Done]:
    job, events = direct.job(prompt, true.request.max_tokens, **options)
    job.answer.drafter = Half(job, list(true.tokens[true.n_prompt :]))
    direct.engine.submit_jobs([job])
    return job, end_of(events)


def first_gap(direct: Direct, a: Job, b: Job) -> float:
    """How much likelier the one next token is than the other, in nats, where two answers part."""
    n = next(i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y)
    _, end = direct.answer(list(a.tokens[:n]), 1, n_logprobs=direct.llm.n_vocab(), ignore_end=True)
    logprobs = {int(token): float(value) for token, value in end.logprobs[0].top.tolist()}
    return abs(logprobs[a.tokens[n]] - logprobs[b.tokens[n]])


@pytest.mark.slow
def test_200_prompts_have_the_same_greedy_answers(direct: Direct) -> None:
    """Sums are formed in another order for several tokens at once, and a quantised cache rounds attention by
    what is in the batch: at ties an answer may part, as it may where others are at work beside it.
    """
    prompts = [make_recall(i, 3).prompt for i in range(200)]

    def answers(turn: int, known: Sequence[Job] = ()) -> list[tuple[Job, str]]:
        """All of them, a few at a time, with drafts of what is known."""
        work = [direct.job(prompt, 24, reuse=False, ignore_end=True) for prompt in prompts]
        for (job, _), twin in zip(work, known, strict=False):
            job.answer.drafter = Half(job, list(twin.tokens[twin.n_prompt :]), seed=twin.n_prompt)
        for job, _ in work[turn:] + work[:turn]:
            direct.engine.submit_jobs([job])
        return [(job, end_of(events).text) for job, events in work]

    plain = answers(0)
    beside = answers(1)
    drafted = answers(0, [job for job, _ in plain])
    drafters = [job.answer.drafter for job, _ in drafted if job.answer.drafter is not None]
    n_drafted, n_accepted = (sum(d.n_drafted for d in drafters), sum(d.n_accepted for d in drafters))
    assert 500 < n_accepted < n_drafted - 100

    def gaps(answers: list[tuple[Job, str]]) -> list[float]:
        pairs = zip(plain, answers, strict=True)
        return [first_gap(direct, a, b) for (a, want), (b, text) in pairs if want != text]

    parted = gaps(drafted)
    assert len(parted) <= len(gaps(beside)) + 5
    assert all(gap < 0.2 for gap in parted)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"sampling": Sampling(temperature=0.8, seed=3, top_p=0.95)},
    "penalties": {"sampling": Sampling(temperature=0.7, seed=4, repeat_penalty=1.3, frequency_penalty=0.5)},
    "dry": {"sampling": Sampling(temperature=0, dry_multiplier=2.0, dry_allowed_length=2)},
    "mirostat": {"sampling": Sampling(temperature=1.0, seed=5, mirostat=2)},
    "stop string": {"stop": [" is"]},
    "min_tokens": {"min_tokens": 30},
    "logprobs": {"n_logprobs": 3},
    "schema": {"sampling": Sampling(temperature=0.8, seed=6, constraint=CONSTRAINT)},
}


@pytest.mark.parametrize("way", WAYS)
def test_all_that_shapes_an_answer_sees_accepted_tokens_only(direct: Direct, way: str) -> None:
    """Three prompts, of which one may part from its twin by a rounding."""
    equal = drafted = 0
    for i in range(3):
        prompt = make_recall(40 + i, 8).prompt
        plain, want = direct.answer(prompt, 90 if way == "schema" else 40, **WAYS[way])
        job, got = answer_with_drafts(direct, prompt, plain, **WAYS[way])
        same = (got.text, got.reason, job.n_answer) == (want.text, want.reason, plain.n_answer)
        equal += same
        if same and got.logprobs:
            a, b = ([each.logprob for each in end.logprobs] for end in (got, want))
            assert a == pytest.approx(b, abs=0.05)
        if way == "schema":
            assert json.loads(got.text).keys() == {"colour", "place"}
        assert job.answer.drafter is not None
        drafted += job.answer.drafter.n_drafted
    assert equal >= 2
    assert drafted


def test_a_thought_ends_at_its_budget(direct: Direct) -> None:
    tags = ThoughtTags(start="<", ends=("|>",), open=True)
    close = direct.tokens("|>")
    prompt = make_recall(50, 8).prompt
    plain, want = direct.answer(prompt, 20, thoughts=tags, thought_budget=5, ignore_end=True)
    _, got = answer_with_drafts(direct, prompt, plain, thoughts=tags, thought_budget=5, ignore_end=True)
    assert got.text == want.text
    assert list(plain.tokens[plain.n_prompt + 5 :][: len(close)]) == close


def test_rejected_drafts_leave_no_rows(direct: Direct) -> None:
    """The sequence is what it would be, its window whole: a later turn goes on from all of it, exactly."""
    kv, junk = direct.llm.kv, Always([7] * 16)
    for n in (10, 33, 64, 90):
        job, events = direct.job(make_recall(60 + n, 8).prompt, n, ignore_end=True)
        job.answer.drafter = junk
        direct.engine.submit_jobs([job])
        end_of(events)
        seq = next(s for s in direct.engine.pool.held() if s.tokens == job.tokens[:-1])
        n_rows = len(seq.tokens)
        low, high = direct.call(lambda seq=seq: kv.positions(seq.id))
        assert (low, high) == (0, n_rows - 1)
        assert direct.call(lambda seq=seq, n=n_rows: kv.holds(seq.id, n))
        turn, _ = direct.answer([*job.tokens, 20, 21], 4)
        assert turn.n_cached == n_rows
        assert turn.exact
    assert junk.n_drafted > 1000


def test_nobody_gives_way_to_drafts(direct: Direct) -> None:
    """A context that is full to the last cell: the step is done without them."""
    n_ctx = direct.engine.n_ctx
    while direct.call(direct.engine.pool.evict):
        pass
    job, events = direct.job([30] * (n_ctx - 20), 100, ignore_end=True)
    other, _ = direct.job([31] * 4, 1000, ignore_end=True)
    job.answer.drafter = Always([7] * 16)
    direct.engine.submit_jobs([job])
    assert end_of(events).reason == "length"
    assert len(job.tokens) == n_ctx
    assert other.seq is None


def test_an_answer_has_no_more_than_max_tokens(direct: Direct) -> None:
    plain, _ = direct.answer(make_recall(70, 8).prompt, 30, ignore_end=True)
    for n in (1, 2, 3, 17, 18):
        job, events = direct.job(plain.prompt, n, ignore_end=True)
        job.answer.drafter = Always(list(plain.tokens[plain.n_prompt + 1 :]))
        direct.engine.submit_jobs([job])
        assert end_of(events).reason == "length"
        assert job.n_answer == n


def test_an_answer_that_is_paused_goes_on(direct: Direct) -> None:
    """Many answers with drafts in few cells: some give way and come back."""
    work = []
    for i in range(6):
        plain, want = direct.answer(make_recall(80 + i, 8).prompt, 60, ignore_end=True)
        work.append((plain, want))
    running = []
    for plain, _ in work:
        job, events = direct.job([*plain.prompt], 60, ignore_end=True, reuse=False)
        job.answer.drafter = Half(job, list(plain.tokens[plain.n_prompt :]))
        running.append((job, events))
    direct.engine.submit_jobs([job for job, _ in running])
    direct.engine.cancel(running[0][0])
    same = [
        end_of(events).text == want.text for (_, events), (_, want) in zip(running[1:], work[1:], strict=True)
    ]
    assert sum(same) >= 4


def test_sampled_tokens_have_the_models_distribution() -> None:
    """Chi-square of the second and the third token of 1,500 answers, of which the likeliest are drafted."""
    prompt, temperature = make_recall(1, 2).prompt.partition("Question")[0] + "The road to", 1.3
    with Direct(kv="f16", parallel=8, idle=4, n_ctx=4096) as direct:
        n_vocab = direct.llm.n_vocab()

        def distribution(tokens: list[int]) -> np.ndarray:
            _, end = direct.answer(tokens, 1, n_logprobs=n_vocab, ignore_end=True)
            logits = np.zeros(n_vocab)
            logits[end.logprobs[0].top["token"]] = end.logprobs[0].top["logprob"]
            p = np.exp(logits / temperature)
            return p / p.sum()

        tokens = direct.tokens(prompt)
        first = int(distribution(tokens).argmax())
        tokens.append(first)
        second = distribution(tokens)
        drafts = [int(second.argmax())]
        third = distribution([*tokens, *drafts])
        drafts.append(int(third.argmax()))
        starts = []
        for seed in range(1500):
            job, events = direct.job(
                tokens[:-1], 3, ignore_end=True, sampling=Sampling(temperature=temperature, seed=seed)
            )
            job.answer.drafter = Always(drafts)
            starts.append((job, events))
        for i in range(0, len(starts), 200):
            part = starts[i : i + 200]
            direct.engine.submit_jobs([job for job, _ in part])
            for _, events in part:
                end_of(events)
        answers = [tuple(job.tokens[job.n_prompt :]) for job, _ in starts]
        assert direct.engine.speculation.n_accepted > 50
    after_first = [answer for answer in answers if answer[0] == first]
    assert_fits(Counter(answer[1] for answer in after_first), second)
    assert_fits(Counter(answer[2] for answer in after_first if answer[1] == drafts[0]), third)


def assert_fits(counts: Counter[int], p: np.ndarray) -> None:
    """Chi-square of counts against probabilities; what is expected less than five times counts together."""
    n = counts.total()
    assert n > 80
    likely = np.flatnonzero(p * n >= 5)
    seen = np.array([counts[int(i)] for i in likely] + [n - sum(counts[int(i)] for i in likely)], float)
    want = np.append(p[likely], 1 - p[likely].sum()) * n
    chi2, freedom = float(((seen - want) ** 2 / np.maximum(want, 1)).sum()), len(likely)
    # Wilson and Hilferty: normal to a cube root; four standard deviations
    z = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom))
    assert z < 4, (chi2, freedom)


def test_what_a_schema_leaves_no_choice_about_is_drafted() -> None:
    with Direct(speculation="prompt-lookup") as direct:
        options = {"temperature": 0, "constraint": CONSTRAINT, "max_tokens": 80}
        plain = direct.engine.submit("Say it:", **options, speculation="off")
        text, before = plain.text, direct.engine.n_steps
        answer = direct.engine.submit("Say it:", **options)
        assert answer.text == text
        assert answer.job.answer.drafter is not None
        assert direct.engine.n_steps - before < answer.job.n_answer * 0.8
        assert answer.job.answer.drafter.n_accepted > 5
        assert direct.engine.speculation.stats()["accepted_tokens"] == answer.job.answer.drafter.n_accepted


def test_a_prediction_is_taken_where_it_comes_true() -> None:
    with Direct() as direct:
        prompt = make_recall(7, 8).prompt
        options = {"temperature": 0, "max_tokens": 40}
        want = direct.engine.submit(prompt, **options)
        before = want.text and direct.engine.n_steps
        answer = direct.engine.submit(prompt, **options, prediction=want.text)
        assert answer.text == want.text
        assert answer.job.answer.drafter is not None
        assert answer.job.answer.drafter.n_accepted >= want.job.n_answer // 2
        assert direct.engine.n_steps - before < want.job.n_answer


@pytest.mark.by_model
@pytest.mark.parametrize("name", ["llama-64", "gemma2", "gpt-oss", "lfm2"])
def test_models_of_all_kinds(zoo_path: Callable[[str], Path], name: str) -> None:
    """Also sliding windows that are long full; recurrent layers are told apart."""
    options = {"n_ctx": 1024, "n_seq_max": 4, "kv_unified": True, "swa_full": False, "verbose": False}
    with (
        Llama(zoo_path(name), kv="f16", **options) as llm,
        Engine(llm, speculation="prompt-lookup") as engine,
    ):
        if name == "lfm2":
            assert engine.submit([5] * 20, max_tokens=20).job.answer.drafter is None
            assert "recurrent" in engine.speculation.stats()["why_off"]
            return
        for seed in range(3):
            prompt = np.random.default_rng(seed).integers(3, 200, 200).tolist()
            plain = engine.submit(prompt, max_tokens=150, temperature=0, speculation="off", reuse=False)
            plain.result()
            greedy = Sampling(temperature=0)
            (job,) = engine.prepare([Request(prompt=prompt, max_tokens=150, sampling=greedy, reuse=False)])
            job.answer.drafter = Half(job, list(plain.job.tokens[200:]), seed)
            answer = Answer(engine, job)
            engine.submit_jobs([job])
            assert answer.text == plain.text
            assert job.answer.drafter.n_accepted > 20
