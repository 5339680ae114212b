"""What an engine asks of a prompt it asks once: whether it fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mixedkv import Llama
from mixedkv.engine import Engine, Request, Sampling
from mixedkv.engine.constrain.constraint_text import Constraint
from mixedkv.errors import ContextLengthError
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
