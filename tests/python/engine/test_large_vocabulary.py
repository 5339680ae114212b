"""Vocabularies as large as those of Llama 3 and Qwen: 150,000 tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.constrain.constraint import constrain
from mixedkv.engine.embed.embedding_context import EmbeddingContext, InputSpan
from mixedkv.engine.engine import Engine
from mixedkv.model.gguf_file import read_model_file
from support.models import zoo
from support.models.zoo import Shape
from support.models.zoo.encoder import decoding_ranker

pytestmark = pytest.mark.full

N_WORDS = 150_000
OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = zoo.make("llama-64")
    model.add_words(N_WORDS)
    path = tmp_path_factory.mktemp("large") / "large.gguf"
    model.write(path)
    return path


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = decoding_ranker(Shape("qwen3-ranker", "qwen3", rope="neox"))
    model.add_words(N_WORDS)
    path = tmp_path_factory.mktemp("ranker") / "ranker.gguf"
    model.write(path)
    return path


@pytest.fixture
def llm(large: Path) -> Iterator[Llama]:
    with Llama(large, n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False) as llm:
        yield llm


def vectors(context: EmbeddingContext, texts: list[list[int]]) -> np.ndarray:
    return context.evaluate([InputSpan(tokens, 0, True) for tokens in texts])


def test_texts_are_embedded(llm: Llama, large: Path) -> None:
    context = EmbeddingContext(llm, read_model_file(large))
    texts = [[1, *range(40 + i, 50 + i)] for i in range(5)]
    together = vectors(context, texts)
    alone = np.concatenate([vectors(context, [text]) for text in texts])
    np.testing.assert_allclose(together, alone, atol=2e-3)


@pytest.mark.parametrize("n_batch", [100, 300, 341, 512])
def test_a_slice_need_not_be_a_multiple_of_the_sequences(n_batch: int) -> None:
    """341 tokens are what a vocabulary of 49,152 comes to: llama.cpp aborted."""
    from mixedkv.bundled import model_path

    with Llama(model_path(), n_ctx=256, n_threads=1, verbose=False) as llm:
        context = EmbeddingContext(llm, read_model_file(model_path()), n_batch=n_batch)
        assert np.isfinite(vectors(context, [[1, 2, 3], [4, 5]])).all()
    with Llama(
        model_path(), embedding=True, pooling_type=1, n_batch=n_batch, n_ctx=512, verbose=False
    ) as llm:
        assert len(llm.embed(["The mill", "The barn"])) == 2


def test_texts_are_ranked(ranker: Path) -> None:
    with Llama(ranker, n_ctx=256, n_threads=1, verbose=False) as llm:
        context = EmbeddingContext(llm, read_model_file(ranker), n_ctx=100)
        scores = vectors(context, [[1, 2, 3], [4, 5, 6, 7]])
        assert scores.shape == (2, 2)
        np.testing.assert_allclose(scores.sum(1), 1, atol=1e-5)


def test_a_schema_is_followed(large: Path) -> None:
    with Llama(
        large, n_ctx=2048, n_seq_max=4, kv_unified=True, n_threads=1, n_threads_batch=1, verbose=False
    ) as llm:
        began = time.perf_counter()
        first = constrain(llm, "json_schema", OBJECT)  # makes the compiler
        compiled = time.perf_counter() - began
        assert first
        steps: list[float] = []

        def timed(ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
            began = time.process_time()  # whatever else runs on this machine
            masked = first(ids, scores)
            steps.append(time.process_time() - began)
            return masked

        text = llm.create_completion("x", max_tokens=40, temperature=0.0, logits_processor=[timed])[
            "choices"
        ][0]["text"]
        assert text.startswith("{")
        assert sorted(steps)[len(steps) // 2] < 0.5, (compiled, steps)
        with Engine(llm) as engine:
            answers = [engine.submit([1, 40 + i], max_tokens=8, temperature=0.0) for i in range(4)]
            assert all(answer.result() for answer in answers)


@pytest.mark.nightly
@pytest.mark.needs("real model")
def test_the_real_model_embeds_and_follows_a_schema(real_model_q4_1: Path) -> None:
    """Its vocabulary has 49,152 tokens, so a slice has 341. The schema is that of docs/server-fields.md."""
    options = {"n_threads": 2, "n_threads_batch": 2, "verbose": False}
    with Llama(real_model_q4_1, n_ctx=1024, kv="mixed", **options) as llm:  # type: ignore[arg-type]
        context = EmbeddingContext(llm, read_model_file(real_model_q4_1))
        assert context.n_slice == 341
        texts = ["The mill stands by the river.", "A mill near a stream.", "Stock prices fell on Monday."]
        near, also, far = vectors(context, [llm.tokenize(text.encode()) for text in texts])
        cosine = lambda a, b: float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))  # noqa: E731
        assert cosine(near, also) > cosine(near, far)
        place = {
            "type": "object",
            "properties": {"code": {"type": "integer", "maximum": 99}},
            "required": ["code"],
        }
        answer = llm.create_chat_completion(
            [{"role": "user", "content": "Which code?"}],
            temperature=0.0,
            max_tokens=200,
            logits_processor=constrain(llm, "json_schema", place),
        )
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert json.loads(answer["choices"][0]["message"]["content"])["code"] <= 99
