"""Answers that a draft model drafts are the answers without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.bundled.corpus import make_recall
from mixedkv.engine import Engine
from mixedkv.engine.draft.speculation import StepTime
from mixedkv.errors import ClosedError
from mixedkv_bench.harness.sample_text import document
from support.models import zoo

pytestmark = pytest.mark.full

WINDOWS_FOR_ALL = True  # F16 rows for every sequence, whatever they take

PROMPTS = [document(i, 120, lambda text: len(text.split()), chat=False) for i in range(4)]  # it goes on so
N_CTX = 1024


@pytest.fixture(autouse=True)
def _drafts_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else this machine does."""
    monkeypatch.setattr(StepTime, "line", lambda _: (1.0, 0.05))


def load(n_seq: int, kv: str = "f16", n_ctx: int = N_CTX, **options: Any) -> Llama:
    return Llama(
        options.pop("path", model_path()),
        kv=kv,
        n_ctx=n_ctx,
        n_seq_max=n_seq,
        kv_unified=True,
        n_threads=1,
        n_threads_batch=1,
        verbose=False,
        **options,
    )


@contextmanager
def engine(draft: Llama, kv: str = "f16") -> Iterator[Engine]:
    with load(9, kv) as llm, Engine(llm, parallel=4, draft_model=draft) as engine:
        yield engine


def answers(engine: Engine, mode: Any, **options: Any) -> tuple[list[str], int]:
    """Of all prompts at a time, and the steps that they took."""
    before = engine.n_steps
    options = {"temperature": 0, **options}
    given = [engine.submit(prompt, max_tokens=40, speculation=mode, **options) for prompt in PROMPTS]
    return [answer.text for answer in given], engine.n_steps - before


@pytest.mark.parametrize("kv", ["f16", "mixed:threshold=64,group=16"])
def test_a_good_one_saves_steps(kv: str) -> None:
    with load(4) as draft, engine(draft, kv) as drafted:
        answers(drafted, "off")  # the prompts' rows are there from here on: steps are those of answers
        answers(drafted, "draft-model")  # and read by the draft model
        plain, n_plain = answers(drafted, "off")
        before = drafted.speculation.n_accepted
        found, n_found = answers(drafted, "draft-model")
        assert sum(a == b for a, b in zip(found, plain, strict=True)) >= 3  # one may part by a rounding
        assert drafted.speculation.n_accepted - before > 40
        assert n_found < 0.7 * n_plain


def test_a_bad_one_is_given_up() -> None:
    """The same weights with positions far apart say nonsense: a few guesses, and later another try."""
    with load(4, rope_freq_scale=37.0) as draft, engine(draft) as drafted:
        asked: list[int] = []
        model = drafted.speculation._model
        assert model is not None
        guess = model.draft
        model.draft = lambda expected: asked.extend(n for _, n in expected) or guess(expected)  # type: ignore
        plain, n_plain = answers(drafted, "off")
        found, n_found = answers(drafted, "draft-model")
        assert sum(a == b for a, b in zip(found, plain, strict=True)) >= 3
        assert len(asked) >= 4
        assert sum(asked) < 4 * 40 / 2
        assert n_found <= n_plain + 2


def test_a_seed_chooses_the_same() -> None:
    with load(4) as draft, engine(draft) as drafted:
        plain, _ = answers(drafted, "off", temperature=0.8, seed=5)
        found, _ = answers(drafted, "draft-model", temperature=0.8, seed=5)
        assert sum(a == b for a, b in zip(found, plain, strict=True)) >= 3
        assert drafted.speculation.n_drafted > 0


def test_later_turns_are_read_on() -> None:
    """What a conversation adds is all that the draft model reads."""
    with load(4) as draft, engine(draft) as drafted:
        messages = [{"role": "user", "content": make_recall(3, 6).prompt}]
        first = drafted.submit(messages, max_tokens=16, temperature=0, speculation="draft-model").text
        read = _n_read(drafted)
        again = [{"role": "assistant", "content": first}, {"role": "user", "content": "And the mill?"}]
        drafted.submit([*messages, *again], max_tokens=16, temperature=0, speculation="draft-model").text  # noqa: B018
        assert max(_n_read(drafted)) > max(read)
        assert sum(n > 0 for n in _n_read(drafted)) == 1


def _n_read(engine: Engine) -> list[int]:
    model = engine.speculation._model
    assert model is not None
    return [len(follower.tokens) for follower in model._followers]


def test_answers_that_it_has_no_room_for_come_without_it() -> None:
    with load(4, n_ctx=256) as draft, engine(draft) as drafted:
        long = make_recall(3, 40).prompt
        plain = drafted.submit(long, max_tokens=16, temperature=0).text
        assert drafted.submit(long, max_tokens=16, temperature=0, speculation="draft-model").text == plain
        assert _n_read(drafted) == [0] * 4
        # four answers share its cells: those that end make room
        for _ in range(2):
            assert len(answers(drafted, "draft-model")[0]) == 4


def test_closing_it_closes_the_engine() -> None:
    draft = load(4)
    with engine(draft) as drafted:
        draft.close()
        with pytest.raises(ClosedError):
            drafted.submit("x")


def test_what_cannot_draft_is_refused(tmp_path: Path) -> None:
    path = zoo.write("llama-64", tmp_path)
    with load(9) as llm, load(2) as few, load(4, path=path) as other:
        for draft, message in (
            (llm, "load a smaller one"),
            (few, "n_seq_max=4, kv_unified=True"),
            (other, "its vocabulary is not that of the model"),
        ):
            with pytest.raises(ValueError, match=message):
                Engine(llm, parallel=4, draft_model=draft)
        with pytest.raises(ValueError, match="give the engine a draft_model"):
            Engine(llm, parallel=4, speculation="draft-model")
        with Engine(llm, parallel=4) as plain, pytest.raises(ValueError, match="give the engine a draft"):
            plain.submit("x", speculation="draft-model")
