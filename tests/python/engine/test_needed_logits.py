"""Under a constraint, greedy answers read the rows of the output matrix that may matter, and are the same."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.bundled.corpus import make_recall
from mixedkv.constrain.constraint import Mask
from mixedkv.constrain.constraint_text import Constraint
from mixedkv.engine import stepping
from mixedkv.engine.draft.speculation import StepTime
from mixedkv.engine.jobs.drafter import Drafter
from mixedkv.engine.jobs.job import Job
from mixedkv.engine.sample.sampler import logits_row
from mixedkv.engine.sample.sampling import Sampling
from mixedkv.engine.schedule.contract import StepPlan
from mixedkv.native.batch import NativeBatch
from support.servers.server import Direct, end_of

pytestmark = pytest.mark.full

WINDOWS_FOR_ALL = True

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["mill", "barn", "house"]},
        "numbers": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 3},
    },
    "required": ["name", "kind", "numbers"],
}
CONSTRAINTS = {
    "schema": Constraint("json_schema", json.dumps(SCHEMA)),
    "numbers": Constraint("json_schema", json.dumps({"type": "number"})),
    "any JSON": Constraint("json_schema", "{}"),
    "words": Constraint("regex", r"(the|a) [a-z]{3,8} is (red|green)\."),
    "anything": Constraint("regex", r"[^x]{5,40}"),
    "gbnf": Constraint("gbnf", 'root ::= "yes" | "no" | [0-9]+ " of " [a-z]+'),
}


def greedy(name: str, **more: Any) -> Sampling:
    return Sampling(temperature=0, constraint=CONSTRAINTS[name], **more)


class Watched:
    """What the steps of an engine wanted: the share of the output matrix's blocks, and how many columns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch, self._needed_logits = monkeypatch, stepping.needed_logits
        self.shares: list[float] = []

    def _watch(self, step: StepPlan[Job]) -> Mask | None:
        mask = self._needed_logits(step)
        self.shares.append(1.0 if mask is None else np.count_nonzero(mask) / len(mask))
        return mask

    def partly(self) -> None:
        self.shares = []
        self._patch.setattr(stepping, "needed_logits", self._watch)

    def wholly(self) -> None:
        self._patch.setattr(stepping, "needed_logits", lambda step: None)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


@pytest.fixture(scope="module", params=["f16", pytest.param("mixed", marks=pytest.mark.nightly)])
def direct(request: pytest.FixtureRequest) -> Iterator[Direct]:
    with Direct(kv=request.param) as direct:
        yield direct


Answers = Callable[[], list[Any]]


def same(watched: Watched, answers: Answers) -> list[Any]:
    """The answers with all logits, which are those with some."""
    watched.wholly()
    whole = answers()
    watched.partly()
    assert answers() == whole
    return whole


@pytest.mark.core
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_an_answer_is_the_same(direct: Direct, watched: Watched, name: str) -> None:
    def answers() -> list[str]:
        prompts = [make_recall(i, 3).prompt for i in range(2)]
        return [direct.answer(prompt, 40, sampling=greedy(name))[1].text for prompt in prompts]

    assert all(same(watched, answers))
    assert name == "anything" or min(watched.shares) < 1


def together(direct: Direct, work: list[tuple[Job, queue.Queue[Any]]]) -> list[str]:
    direct.engine.submit_jobs([job for job, _ in work])
    return [end_of(events).text for _, events in work]


def test_answers_beside_each_other_are_the_same(direct: Direct, watched: Watched) -> None:
    def answers() -> list[str]:
        names = ["schema", "words", "numbers", "gbnf"]
        prompts = [make_recall(i, 3).prompt for i in range(4)]
        pairs = zip(prompts, names, strict=True)
        return together(direct, [direct.job(prompt, 40, sampling=greedy(name)) for prompt, name in pairs])

    same(watched, answers)
    assert min(watched.shares) < 1


def test_an_answer_that_reads_all_logits_has_them(direct: Direct, watched: Watched) -> None:
    """Steps in which it takes part are whole, and others are not."""
    others: dict[str, dict[str, Any]] = {
        "free": {"sampling": Sampling(temperature=0)},
        "drawn": {"sampling": Sampling(temperature=0.8, seed=3, constraint=CONSTRAINTS["schema"])},
        "penalised": {"sampling": greedy("schema", repeat_penalty=1.3)},
        "with a bias": {"sampling": greedy("schema", logit_bias=((65, 2.0),))},
        "with logprobs": {"sampling": greedy("schema"), "n_logprobs": 5},
    }
    prompt = make_recall(1, 3).prompt
    for options in others.values():

        def answers(options: dict[str, Any] = options) -> list[str]:
            work = [direct.job(prompt, 5, **options), direct.job(prompt, 30, sampling=greedy("schema"))]
            return together(direct, work)

        same(watched, answers)
        assert watched.shares[:5] == [1.0] * 5
        assert min(watched.shares) < 1


def test_logprobs_of_a_question_that_was_answered_without(direct: Direct, watched: Watched) -> None:
    prompt = make_recall(2, 3).prompt

    def answers() -> list[Any]:
        _, plain = direct.answer(prompt, 20, sampling=greedy("schema"))
        _, done = direct.answer(prompt, 20, sampling=greedy("schema"), n_logprobs=direct.llm.n_vocab())
        assert done.text == plain.text
        return [logprob.top.tolist() for logprob in done.logprobs]

    tops = same(watched, answers)
    assert np.isfinite([logprob for top in tops for _, logprob in top]).all()


class Half(Drafter):
    """Knows the answer and says it, but for every third token."""

    def __init__(self, job: Job, answer: list[int]) -> None:
        super().__init__()
        self._job, self._answer = job, answer

    def draft(self, most: int, certain: object = ()) -> tuple[list[int], float]:
        at = self._job.n_answer
        drafts = self._answer[at : at + max(most, 0)]
        return [token if i % 3 < 2 else 70 + at % 50 for i, token in enumerate(drafts)], 0.98

    def take(self, token: int) -> None:
        pass


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_drafts_are_checked_alike(
    direct: Direct, watched: Watched, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Those that the constraint refuses too."""
    monkeypatch.setattr(StepTime, "line", lambda _: (1.0, 0.001))
    prompt = make_recall(3, 3).prompt
    true, _ = direct.answer(prompt, 40, sampling=greedy(name))

    def answers() -> list[Any]:
        job, events = direct.job(prompt, 40, sampling=greedy(name))
        job.answer.drafter = drafter = Half(job, list(true.tokens[true.n_prompt :]))
        direct.engine.submit_jobs([job])
        return [end_of(events).text, drafter.n_drafted, drafter.n_accepted]

    text, drafted, accepted = same(watched, answers)
    assert text
    assert 0 < accepted < drafted
    assert name == "anything" or min(watched.shares) < 1


def evaluate(llm: Llama, tokens: list[int], needed_logits: Mask | None = None) -> npt.NDArray[np.float32]:
    """Logits of all these tokens, from an empty cache."""
    llm._ctx.kv_cache_clear()
    batch = NativeBatch(np.array(tokens, np.int32))
    batch.pos[:], batch.logits[:], batch.native.n_tokens = np.arange(len(tokens)), 1, len(tokens)
    assert llm.kv.decode(batch.native, needed_logits) == 0
    return np.stack([logits_row(llm.ctx, i, llm.n_vocab()) for i in range(len(tokens))]).copy()


@pytest.mark.core
@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("file", ["bundled", "q4_1"])
def test_logits_have_the_same_bits_or_are_not_there(
    file: str, n_threads: int, zoo_q4_1_path: Callable[[str], Path]
) -> None:
    path = model_path() if file == "bundled" else zoo_q4_1_path("llama-64")
    with Llama(path, n_ctx=64, n_threads=n_threads, n_threads_batch=n_threads, verbose=False) as llm:
        n_vocab, random = llm.n_vocab(), np.random.default_rng(5)
        for n_tokens in (1, 3, 20):
            tokens = random.integers(1, 200, n_tokens).tolist()
            whole = evaluate(llm, tokens)
            needed_logits = random.integers(0, 2**32, -(-n_vocab // 32), np.uint32)
            needed_logits[random.random(len(needed_logits)) < 0.6] = 0
            there = np.repeat(needed_logits != 0, 32)[:n_vocab]
            some = evaluate(llm, tokens, needed_logits)
            np.testing.assert_array_equal(some[:, there], whole[:, there])
            assert np.isneginf(some[:, ~there]).all()
            np.testing.assert_array_equal(evaluate(llm, tokens), whole)


def test_a_mask_of_another_vocabulary_is_refused(direct: Direct) -> None:
    with pytest.raises(ValueError, match="the vocabulary has"):
        direct.call(lambda: evaluate(direct.llm, [1], np.ones(3, np.uint32)))
