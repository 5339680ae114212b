"""A split model answers as the whole one does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.tokens import common_prefix
from mixedkv_split.client import SplitClient
from mixedkv_split.head import Head
from support.servers import split_servers

pytestmark = pytest.mark.full

_N_ANSWER = 12
_PROMPTS = split_servers.random_prompts(100)


@pytest.fixture(scope="module", params=split_servers.ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split_servers.write(request.param, tmp_path_factory.mktemp("split"))


@pytest.fixture(scope="module")
def head(model: Path) -> Iterator[Head]:
    with Head(split_servers.split(model, model.parent).head, n_threads=1) as head:
        yield head


@pytest.fixture(scope="module")
def address(model: Path, head: Head) -> Iterator[str]:
    with split_servers.running(model.with_suffix(".body.gguf")) as server:
        yield server.address


@pytest.fixture(scope="module")
def whole(model: Path) -> Iterator[Llama]:
    with Llama(
        model, kv="f16", n_ctx=1024, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(whole: Llama) -> list[list[int]]:
    return [split_servers.local_tokens(whole, prompt, _N_ANSWER) for prompt in _PROMPTS]


def _answers(head: Head, address: str, precision: str) -> list[list[int]]:
    answers = []
    with SplitClient(head, address, precision=precision) as client:
        for prompt in _PROMPTS:
            with client.session() as session:
                answers.append(list(session.generate_tokens(prompt, max_tokens=_N_ANSWER, temperature=0)))
    return answers


@pytest.mark.nightly
def test_100_prompts_have_the_same_answers_as_locally(
    head: Head, address: str, expected: list[list[int]]
) -> None:
    assert _answers(head, address, "f32") == expected


@pytest.mark.nightly
def test_f16_changes_an_answer_only_where_logits_are_nearly_equal(
    head: Head, address: str, whole: Llama, expected: list[list[int]]
) -> None:
    answers = _answers(head, address, "f16")
    for prompt, answer, local in zip(_PROMPTS, answers, expected, strict=True):
        if answer == local:
            continue
        n = common_prefix(np.array(answer, np.int32), np.array(local, np.int32))
        whole.reset()
        whole.eval([*prompt, *local[:n]])
        logits = whole.scores[whole.n_tokens - 1]
        chosen = [logits[answer[n] if n < len(answer) else whole.token_eos()], logits.max()]
        assert chosen[1] - chosen[0] < 0.02 * logits.std()
    n_same = sum(answer == local for answer, local in zip(answers, expected, strict=True))
    print(f"{n_same} of {len(answers)} answers are the same with F16 vectors")
    assert n_same >= 95
