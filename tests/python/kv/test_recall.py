"""The bundled model reads a journal and answers from it: what precision of the cache does to facts far above.

Facts inside the window come back as from an F16 cache, word for word; facts in the cold region come back as
well as from llama.cpp's uniform cache of the cold type. Corpus and model: mixedkv.bundled.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from mixedkv import Llama, MixedKVConfig, bundled
from mixedkv.bundled import corpus

pytestmark = pytest.mark.full

N_CTX = 1024
TURN = "<|user|>{}<|end|><|assistant|>"


def journal(seed: int, n_sentences: int, fact_at: slice) -> tuple[str, str, str]:
    """A prompt that ends with a question about a fact stated in the given part of it; the question; its
    answer.
    """
    r = random.Random(f"held out {seed}")
    world, sentences, answers = corpus.World(r), [], []
    first, last, _ = fact_at.indices(n_sentences)
    for i in range(n_sentences):
        fact = world.fact() if r.random() < 0.4 or i == first else None
        sentences.append(fact[0] if fact else corpus.filler(r))
        if fact and first <= i < last:
            answers.append(fact)
    _, question, answer = r.choice(answers)
    text = TURN.format(" ".join(sentences)) + "I have noted that.<|end|>" + TURN.format(question)
    return text, question, answer


@pytest.fixture(scope="module")
def ask() -> Iterator:
    """ask(kv, prompts) -> greedy answers; one Llama per cache setting."""
    models: dict[object, Llama] = {}

    def ask_(kv: object, prompts: list[str]) -> list[str]:
        if kv not in models:
            options = {
                "n_ctx": N_CTX,
                "n_threads": 1,
                "n_threads_batch": 1,
                "flash_attn": True,
                "verbose": False,
            }
            models[kv] = Llama(str(bundled.model_path()), kv=kv, **options)
        answers = []
        for prompt in prompts:
            models[kv].reset()
            out = models[kv].create_completion(prompt, max_tokens=24, temperature=0.0, stop=["<|end|>"])
            answers.append(out["choices"][0]["text"].strip())
        return answers

    yield ask_
    for model in models.values():
        model.close()


def test_facts_within_the_window_read_as_f16(ask) -> None:
    """The whole prompt fits the window; then one whose facts do, with older text in the cold region."""
    recent = [journal(seed, 18, slice(0, None)) for seed in range(6)]
    late = [journal(seed, 40, slice(30, None)) for seed in range(6)]
    kv = MixedKVConfig(quantization_threshold=448, group_size=32)
    prompts = [text for text, _, _ in recent + late]
    mixed, f16 = ask(kv, prompts), ask("f16", prompts)
    assert mixed == f16
    right = sum(answer == want for answer, (_, _, want) in zip(mixed, recent + late, strict=True))
    assert right >= 10, "the model does not know its facts: the test would show nothing"


@pytest.mark.nightly
def test_facts_in_the_cold_region_are_recalled_as_by_the_cold_type(ask) -> None:
    cases = [journal(100 + seed, 45, slice(0, 20)) for seed in range(10)]
    prompts = [text for text, _, _ in cases]

    def right(kv: object) -> int:
        return sum(answer == want for answer, (_, _, want) in zip(ask(kv, prompts), cases, strict=True))

    mixed = right(MixedKVConfig(quantization_threshold=64, group_size=32, sink_tokens=4))
    assert mixed >= right("q4_0") - 1
    assert mixed >= 8


def test_a_spec_says_the_same_as_a_config(ask) -> None:
    """As `mixedkv run --kv mixed:...` has it."""
    prompts = [journal(200 + seed, 18, slice(0, None))[0] for seed in range(4)]
    assert ask("mixed:threshold=448,group=32", prompts) == ask("f16", prompts)
