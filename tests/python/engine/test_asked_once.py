"""What an engine asks of a prompt it asks once: whether it fits, and what the context has of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mixedkv import Llama
from mixedkv.engine import ChunkConnector, Engine, Sampling, StoreConnector
from mixedkv.engine.answer import Answer
from mixedkv.engine.constrain.constraint_text import Constraint
from mixedkv.engine.schedule.request import Request
from mixedkv.errors import ContextLengthError
from mixedkv.start.sequences import SequencePool
from mixedkv.store import KVStore
from support.conversation_support import RECALL, open_llama

GREEDY: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0}


@pytest.fixture(scope="module")
def shared() -> Iterator[Llama]:
    with open_llama("mixed:cold=q8_0", n_ctx=2048, n_seq_max=4, kv_unified=True) as llm:
        yield llm


def test_the_length_of_a_prompt_is_looked_at_once(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    check = Engine.check_prompt
    monkeypatch.setattr(Engine, "check_prompt", lambda self, n: (lengths.append(n), check(self, n))[1])
    with Engine(llm) as engine:
        answer = engine.submit(RECALL.prompt, **GREEDY)
        answer.result()
        assert lengths == [answer.job.n_prompt]


def test_a_prompt_that_does_not_fit_is_refused_before_its_constraint_is_read(llm: Llama) -> None:
    wrong = Sampling(constraint=Constraint("regex", "(", "regex"))
    with Engine(llm) as engine:
        with pytest.raises(ValueError, match="regex"):
            engine.prepare([Request(prompt=[5], max_tokens=1, sampling=wrong)])
        with pytest.raises(ContextLengthError, match="2048 tokens"):
            engine.prepare([Request(prompt=[5] * 2048, max_tokens=1, sampling=wrong)])


@pytest.mark.parametrize("kind", ["prefix", "chunks"])
def test_the_context_is_searched_once_for_a_prompt(
    kind: str, llm: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that looks into the store asks nothing; only rows that had to be read meanwhile are compared
    with the context once more.
    """
    searched: list[int] = []
    match = SequencePool.match
    monkeypatch.setattr(
        SequencePool,
        "match",
        lambda self, tenant, prompt, accept=None, chunks=None: (
            searched.append(len(prompt)),
            match(self, tenant, prompt, accept, chunks),
        )[1],
    )

    def connector() -> StoreConnector:
        store = KVStore(tmp_path)
        return StoreConnector(store) if kind == "prefix" else ChunkConnector(store, repair="none", check=0)

    with Engine(llm, connector=connector()) as engine:
        first = engine.submit(RECALL.prompt, **GREEDY)
        first.result()
        engine._connector.flush()  # type: ignore[union-attr]
        searched.clear()
        again = engine.submit(RECALL.prompt, **GREEDY)
        again.result()
        assert again.job.cached_tier == "context"
        assert len(searched) == 1
    searched.clear()
    with Engine(llm, connector=connector()) as engine:  # the context is empty, the store is not
        third = engine.submit(RECALL.prompt, **GREEDY)
        assert third.text == first.text
        assert third.job.cached_tier in ("ram", "disk")
        assert len(searched) == 1


def test_a_session_keeps_what_another_one_has_stored(llm: Llama, tmp_path: Path) -> None:
    """The second had nothing new to store, and lost all when the first was removed."""
    store = KVStore(tmp_path)
    connector = StoreConnector(store)
    with Engine(llm, connector=connector) as engine:
        for session in ("a", "b"):
            request = Request(
                prompt=list(range(40, 140)),
                max_tokens=4,
                sampling=Sampling(temperature=0.0),
                session=session,
            )
            (job,) = engine.prepare([request])
            answer = Answer(engine, job)
            engine.submit_jobs([job])
            assert answer.result()
            connector.flush()
        assert store.remove(session="a") == 0
        assert store.remove(session="b") > 0
