"""What an engine refuses before it reads more, and what it keeps of sessions that share rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mixedkv import Llama
from mixedkv.constrain.constraint_text import Constraint
from mixedkv.engine import Engine, Sampling, StoreConnector
from mixedkv.engine.answer import Answer
from mixedkv.engine.schedule.request import Request
from mixedkv.errors import ContextLengthError
from mixedkv.store import KVStore
from support.engine.conversations import open_llama

pytestmark = pytest.mark.full

GREEDY: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0}


@pytest.fixture(scope="module")
def shared() -> Iterator[Llama]:
    with open_llama("mixed:cold=q8_0", n_ctx=2048, n_seq_max=4, kv_unified=True) as llm:
        yield llm


def test_a_prompt_that_does_not_fit_is_refused_before_its_constraint_is_read(llm: Llama) -> None:
    wrong = Sampling(constraint=Constraint("regex", "(", "regex"))
    with Engine(llm) as engine:
        with pytest.raises(ValueError, match="regex"):
            engine.prepare([Request(prompt=[5], max_tokens=1, sampling=wrong)])
        with pytest.raises(ContextLengthError, match="2048 tokens"):
            engine.prepare([Request(prompt=[5] * 2048, max_tokens=1, sampling=wrong)])


def test_a_session_keeps_what_another_one_has_stored(llm: Llama, tmp_path: Path) -> None:
    """The second had nothing new to store, and lost all when the first was removed."""
    store = KVStore(tmp_path)
    connector = StoreConnector(store)
    with Engine(llm, connector=connector) as engine:
        for session in ("a", "b"):
            request = Request(
                prompt=list(range(40, 140)), max_tokens=4, sampling=Sampling(temperature=0.0), session=session
            )
            (job,) = engine.prepare([request])
            answer = Answer(engine, job)
            engine.submit_jobs([job])
            assert answer.result()
            connector.flush()
        assert store.remove(session="a") == 0
        assert store.remove(session="b") > 0
