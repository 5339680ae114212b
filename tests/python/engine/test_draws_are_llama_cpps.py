"""What is drawn without llama.cpp's samplers is what they draw, number for number."""

from __future__ import annotations

import itertools

import llama_cpp
import numpy as np
import pytest

from mixedkv.engine.sample.draw import Draw
from mixedkv.engine.sample.sampling import Sampling

pytestmark = pytest.mark.full

N_VOCAB = 9000


class Chain:
    """llama.cpp's samplers in its order."""

    def __init__(self, s: Sampling) -> None:
        self.chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        for part in (
            llama_cpp.llama_sampler_init_top_k(s.top_k),
            llama_cpp.llama_sampler_init_top_p(s.top_p, 1),
            llama_cpp.llama_sampler_init_min_p(s.min_p, 1),
            llama_cpp.llama_sampler_init_temp(s.temperature),
            llama_cpp.llama_sampler_init_dist(s.seed),
        ):
            llama_cpp.llama_sampler_chain_add(self.chain, part)

    def choose(self, logits: np.ndarray) -> int:
        data = (llama_cpp.llama_token_data * len(logits))()
        for i, (one, logit) in enumerate(zip(data, logits.tolist(), strict=True)):
            one.id, one.logit, one.p = i, logit, 0.0
        array = llama_cpp.llama_token_data_array(data=data, size=len(logits), selected=-1, sorted=False)
        llama_cpp.llama_sampler_apply(self.chain, llama_cpp.ctypes.pointer(array))
        return int(data[array.selected].id)

    def close(self) -> None:
        llama_cpp.llama_sampler_free(self.chain)


def some_logits(rng: np.random.Generator, n: int = N_VOCAB) -> np.ndarray:
    """Of a model that knows a little: a few tokens stand out."""
    logits = rng.normal(0, rng.uniform(0.5, 3), n)
    logits[rng.choice(n, 30)] += rng.exponential(4, 30)
    return logits.astype(np.float32)


@pytest.mark.parametrize("top_k", [0, 1, 40, 500, 10**6])
def test_llama_cpp_draws_the_same_tokens(top_k: int) -> None:
    rng = np.random.default_rng(top_k)
    same = n = 0
    for temperature, top_p, min_p in itertools.product((0.3, 1.0, 1.7), (1.0, 0.95, 0.4), (0.0, 0.05)):
        s = Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=int(rng.integers(2**32))
        )
        assert Draw.serves(s)
        chain, draw = Chain(s), Draw(s)
        for size in (1, 2, 600, N_VOCAB, N_VOCAB):
            logits = some_logits(rng, size) if size > 30 else rng.normal(0, 1, size).astype(np.float32)
            same += chain.choose(logits) == draw.choose(logits)
            n += 1
        chain.close()
    assert (
        same >= n - 1
    )  # a nucleus of thousands ends elsewhere now and then, where llama.cpp adds in 32 bits


def test_the_likeliest_token_comes_first_of_equals() -> None:
    logits = np.zeros(600, np.float32)
    logits[[7, 300]] = 2.0
    assert Draw(Sampling(temperature=0)).choose(logits) == 7


@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 1e-30}]
)
def test_what_cannot_be_drawn_never_is(settings: dict[str, float]) -> None:
    logits = np.full(3000, -np.inf, np.float32)
    draw = Draw(Sampling(**settings))
    assert 0 <= draw.choose(logits) < len(logits)  # nothing is possible: any
    logits[[5, 2900]] = 1.0
    assert {draw.choose(logits) for _ in range(40)} <= {5, 2900}


def test_shares_are_those_of_the_softmax() -> None:
    logits = np.array([0.0, 1.0, 2.0, -1.0] * 250, np.float32)
    draw = Draw(Sampling(temperature=0.7, seed=3))
    counts = np.bincount([draw.choose(logits) % 4 for _ in range(20_000)], minlength=4)
    expected = np.exp(logits[:4] / 0.7)
    expected *= counts.sum() / expected.sum()
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


@pytest.mark.parametrize(
    "other", [{"repeat_penalty": 1.1}, {"typical_p": 0.9}, {"logit_bias": ((1, 2.0),)}, {"mirostat": 2}]
)
def test_other_samplers_are_llama_cpps(other: dict[str, float]) -> None:
    assert not Draw.serves(Sampling(**other))
