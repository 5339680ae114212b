"""Values that are no numbers end the answer that they come in, name themselves, and reach no other answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.constrain.constraint_text import Constraint
from mixedkv.engine import Engine
from mixedkv.engine.embed.embedding_context import EmbeddingContext, InputSpan
from mixedkv.errors import NotFiniteError
from mixedkv.model.gguf_file import read_model_file
from support.models import zoo
from support.models.not_finite import write_model

pytestmark = pytest.mark.full

GOOD = "The mill stands by the river. Anna went to the"
OTHER = "A long journal of a village, with a barn and a well. " * 4
CACHES = ["f16", "q8_0", "q4_0", "mixed", "mixed:attention=merged", "q8_0:attention=fused"]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of its logits are NaN."""
    return write_model(tmp_path_factory.mktemp("broken") / "model.gguf")


@pytest.fixture(scope="module")
def poison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedding of one token is NaN: that of " goat"."""
    return write_model(tmp_path_factory.mktemp("poison") / "model.gguf", (bad_token(),))


def bad_token() -> int:
    llm = Llama(str(model_path()), vocab_only=True, verbose=False)
    try:
        return int(llm.tokenize(b" zebra quilt", add_bos=False)[-1])
    finally:
        llm.close()


@pytest.fixture(params=CACHES)
def engine(request: pytest.FixtureRequest, poison: Path) -> Iterator[Engine]:
    llm = Llama(
        poison, n_ctx=1024, n_seq_max=8, kv_unified=True, kv=request.param, verbose=False, n_threads=1
    )
    with Engine(llm) as made:
        yield made
    llm.close()


def ask(engine: Engine, prompt: Any, n: int = 8, **options: Any) -> Any:
    return engine.submit(prompt, max_tokens=n, temperature=0, **options)


def tokens(engine: Engine, text: str, bad: bool = False) -> list[int]:
    ids = engine.tokenizer.tokenize(text)
    return [*ids[: len(ids) // 2], bad_token(), *ids[len(ids) // 2 :]] if bad else ids


def test_an_answer_ends_with_the_error_and_others_go_on(engine: Engine) -> None:
    good = tokens(engine, GOOD)
    expected = ask(engine, good, reuse=False).text
    assert expected
    beside = ask(engine, good, 40, reuse=False)
    bad = ask(engine, tokens(engine, OTHER, bad=True))
    with pytest.raises(NotFiniteError, match=r"not numbers \(NaN or infinite\)"):
        _ = bad.text
    assert beside.text.startswith(expected)  # a neighbour of the same steps
    for _ in range(3):  # in the cells that were left
        assert ask(engine, good, reuse=False).text == expected
    assert ask(engine, good).text == expected
    assert engine.not_finite.n == 1
    assert not engine.not_finite.is_broken


def test_rows_that_are_no_numbers_are_no_start_of_another_prompt(engine: Engine) -> None:
    bad = [*tokens(engine, OTHER, bad=True), *tokens(engine, OTHER)]
    for _ in range(2):
        answer = ask(engine, bad)
        with pytest.raises(NotFiniteError):
            _ = answer.text
        assert not answer.job.n_cached or answer.job.n_cached <= bad.index(bad_token())
    # nor where no logits were read of them
    answer = ask(engine, [*bad, *tokens(engine, GOOD)], 1)
    with pytest.raises(NotFiniteError):
        _ = answer.text
    assert all(bad_token() not in seq.tokens for seq in engine.pool.held())


def test_a_model_that_gives_no_numbers(broken: Path) -> None:
    llm = Llama(broken, n_ctx=512, n_seq_max=4, kv_unified=True, verbose=False, n_threads=1)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    with Engine(llm) as engine:
        for options in (
            {},
            {"n_logprobs": 2},
            {"presence_penalty": 1.0},
            {"constraint": Constraint("json_schema", json.dumps(schema))},
        ):
            answer = engine.submit(GOOD, max_tokens=8, **options)
            with pytest.raises(NotFiniteError):
                _ = answer.text
        assert engine.not_finite.n == 4
        assert engine.not_finite.is_broken
    llm.close()


@pytest.mark.parametrize("kv", CACHES)
def test_a_plain_llama_raises_and_goes_on(poison: Path, kv: str) -> None:
    llm = Llama(poison, n_ctx=512, kv=kv, verbose=False, n_threads=1)
    good = llm.tokenize(GOOD.encode())
    expected = llm.create_completion(good, max_tokens=8, temperature=0)["choices"][0]["text"]
    bad = [*good, bad_token(), *good]
    with pytest.raises(NotFiniteError, match="token"):
        llm.create_completion(bad, max_tokens=8, temperature=0)
    assert llm.n_tokens <= len(good)
    for stream in (False, True):
        with pytest.raises(NotFiniteError):
            list(llm.create_completion(bad, max_tokens=8, stream=stream))
    llm.kv.clear_unused()
    llm.reset()
    assert llm.create_completion(good, max_tokens=8, temperature=0)["choices"][0]["text"] == expected
    llm.close()


def test_rows_of_such_values_are_not_exact(poison: Path) -> None:
    """Whoever evaluates by llama.cpp's own functions finds them unverified."""
    llm = Llama(poison, n_ctx=512, verbose=False, n_threads=1)
    ids = llm.tokenize(GOOD.encode())
    with pytest.raises(NotFiniteError):
        llm.kv.fill([ids[0], bad_token(), ids[1]], [0, 1, 2])
    assert llm.kv.positions(0) == (-1, -1)
    llm.kv.fill(ids, np.arange(len(ids)))
    assert llm.kv.exact(0, ids) == len(ids)
    llm.close()


def test_vectors_of_a_text_are_numbers(poison: Path) -> None:
    llm = Llama(poison, n_ctx=512, embedding=True, verbose=False, n_threads=1)
    expected = llm.embed(GOOD)
    bad = llm.detokenize([bad_token()]).decode()
    with pytest.raises(NotFiniteError, match="vector"):
        llm.embed(f"{GOOD}{bad} x")
    np.testing.assert_array_equal(llm.embed(GOOD), expected)
    llm.close()


KINDS = ["lfm2", "falcon-h1", "qwen3next", "mamba", "rwkv7", "gpt-oss", "deepseek2", "glm4moe"]


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_models(tmp_path: Path, kind: str) -> None:
    """A state that is NaN would stay NaN: llama.cpp clears one by multiplying it by 0."""
    model, bad = zoo.make(kind), 57
    embeddings = model.tensors["token_embd.weight"]
    model.tensors.setdefault("output.weight", embeddings.copy())
    model.tensors["token_embd.weight"] = embeddings.copy()
    model.tensors["token_embd.weight"][bad] = np.nan
    model.write(tmp_path / "m.gguf")
    llm = Llama(
        tmp_path / "m.gguf", kv="f16", n_ctx=256, n_seq_max=4, kv_unified=True, verbose=False, n_threads=1
    )
    good = list(range(20, 40))
    with Engine(llm) as engine:
        expected = answer_tokens(engine, good)
        beside = ask(engine, good, 24, reuse=False)
        for _ in range(2):
            with pytest.raises(NotFiniteError):
                _ = ask(engine, [*good[:4], bad, *good[4:]]).text
            for _ in range(4):
                assert answer_tokens(engine, good) == expected
        assert beside.result().text is not None
    llm.close()


def answer_tokens(engine: Engine, prompt: list[int]) -> list[int]:
    answer = ask(engine, prompt, reuse=False)
    answer.result()
    return list(answer.job.tokens[len(prompt) :])


def test_a_text_of_no_numbers_spoils_no_other_vector(poison: Path) -> None:
    """Texts are embedded in one batch, by attention that multiplies masked rows."""
    llm = Llama(poison, n_ctx=512, kv="f16", verbose=False, n_threads=1)
    context = EmbeddingContext(llm, read_model_file(poison), n_ctx=256)
    good = np.array(llm.tokenize(GOOD.encode()), np.int32)
    bad = np.array([*good[:3], bad_token(), *good[3:]], np.int32)
    (expected,) = context.evaluate([InputSpan(good, 0, True)])
    for _ in range(2):
        found = context.evaluate(
            [InputSpan(good, 0, True), InputSpan(bad, 0, True), InputSpan(good, 0, True)]
        )
        assert np.isfinite(found[[0, 2]]).all()
        assert not np.isfinite(found[1]).any()
        np.testing.assert_allclose(found[[0, 2]], [expected, expected], rtol=1e-3, atol=1e-4)
    # an input in two pieces, of which the first one is spoiled: it stays so, and others go on
    context.evaluate([InputSpan(bad, 0, False)])
    found = context.evaluate([InputSpan(good, len(bad), True), InputSpan(good, 0, True)])
    assert not np.isfinite(found[0]).any()
    np.testing.assert_allclose(found[1], expected, rtol=1e-3, atol=1e-4)
    llm.close()
