"""A split model answers as the whole one does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mixedkv import Llama
from mixedkv.split.client import SplitClient
from mixedkv.split.head import Head
from support import split_support

_N_ANSWER = 12


@pytest.fixture(scope="module", params=split_support.ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split_support.write(request.param, tmp_path_factory.mktemp("split"))


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[SplitClient]:
    parts = split_support.split(model, model.parent)
    with (
        Head(parts.head, n_threads=1) as head,
        split_support.running(parts.body) as server,
        SplitClient(head, server.address, precision="f32") as client,
    ):
        yield client


@pytest.fixture(scope="module")
def whole(model: Path) -> Iterator[Llama]:
    with Llama(model, kv="f16", n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False) as llm:
        yield llm


def test_100_prompts_have_the_same_answers_as_locally(client: SplitClient, whole: Llama) -> None:
    for prompt in split_support.random_prompts(100):
        with client.session() as session:
            answer = list(session.generate_tokens(prompt, max_tokens=_N_ANSWER, temperature=0))
        assert answer == split_support.local_tokens(whole, prompt, _N_ANSWER)
