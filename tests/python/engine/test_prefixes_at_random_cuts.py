"""Prompts that branch off each other anywhere, on a context whose cells are nearly used up: an answer that
counts as exact is that of a fresh context, whatever rows layers with a sliding window have let go of.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mixedkv import Llama
from mixedkv.engine.prompt_cache import PromptCache
from mixedkv.kv.cache import KVCache
from mixedkv.store import KVStore
from support.cache.fresh_context import FreshContext
from support.cache.same_bits import has_same_bits

pytestmark = [pytest.mark.full, pytest.mark.by_model]

N_CTX, N_TOKENS = 192, 6  # tokens of all sequences together, and of an answer
# Weights in Q4_1 have products that do not depend on the batch. So where this cache attends an answer is that
# of a fresh context, but for the digits of log-probabilities; llama.cpp's attention rounds otherwise in other
# batches and cells. Rows that are missing change answers by up to 19.
NEAR, NEAR_BY_LLAMA_CPP = 1e-5, 0.5
MODELS = ("gemma2", "gemma4", "gpt-oss")
ALL = ("llama-64", *MODELS)
CACHES = ("f16", "q8_0", "mixed:threshold=0,sinks=0,cold=q8_0", "mixed:threshold=16,group=8,sinks=4")


def near(path: Path, kv: str) -> float:
    return NEAR if has_same_bits(path, kv) else NEAR_BY_LLAMA_CPP


def prompts(rng: random.Random, n: int, n_words: int) -> list[list[int]]:
    """Return prompts of which most begin like one before."""
    made: list[list[int]] = []
    for _ in range(n):
        begin: list[int] = []
        if made and rng.random() < 0.8:
            other = rng.choice(made[-6:])
            begin = other[: rng.randint(1, len(other))]
        rest = [rng.randrange(3, n_words) for _ in range(rng.randint(1, 40))]
        made.append((begin + rest)[: N_CTX - N_TOKENS - 8])
    return made


def play(
    path: Path,
    kv: str,
    swa_full: bool,
    n_seq: int,
    seed: int,
    n: int,
    store: KVStore | None = None,
    n_windows: int = 0,
) -> tuple[int, list[str]]:
    """Return how many answers were exact, and those of them that are wrong."""
    rng, fresh, wrong, n_exact = random.Random(seed), FreshContext(path, kv, N_CTX), list[str](), 0
    options: dict[str, Any] = {"n_ctx": N_CTX, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    options |= {"n_batch": 32, "swa_full": swa_full, "n_windows": n_windows}
    llm = Llama(path, kv=kv, n_seq_max=n_seq, kv_unified=True, **options)
    with llm, fresh.llm, PromptCache(llm, store, parallel=min(2, n_seq - 1)) as cache:
        todo = prompts(rng, n, llm.n_vocab())
        while todo:
            n_at_once = rng.randint(1, 2)
            some, todo = todo[:n_at_once], todo[n_at_once:]
            asked = {"max_tokens": rng.randint(1, N_TOKENS), "temperature": 0, "n_logprobs": 1}
            for prompt, answer in [(prompt, cache.engine.submit(prompt, **asked)) for prompt in some]:
                off = fresh.off(prompt, answer)
                n_exact += answer.job.exact
                if answer.job.exact and off > near(path, kv):
                    wrong.append(
                        f"{len(prompt)} tokens, {answer.job.n_evaluated} evaluated: off by {off:.3f}"
                    )
    return n_exact, wrong


@pytest.mark.parametrize("swa_full", [pytest.param(True, marks=pytest.mark.nightly), False])
@pytest.mark.parametrize("kv", CACHES)
@pytest.mark.parametrize("name", MODELS)
def test_an_exact_answer_is_that_of_a_fresh_context(
    name: str, kv: str, swa_full: bool, zoo_q4_1_path: Callable[[str], Path]
) -> None:
    n_exact, wrong = play(zoo_q4_1_path(name), kv, swa_full, n_seq=3, seed=1, n=40)
    assert n_exact >= 8
    assert not wrong


@pytest.mark.parametrize(
    "kv", [pytest.param("f16", marks=pytest.mark.nightly), "mixed:threshold=16,group=8,sinks=4"]
)
@pytest.mark.parametrize("name", MODELS)
def test_windows_of_idle_sequences_are_let_go(
    name: str, kv: str, zoo_q4_1_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for four of eight sequences: the others come back from checkpoints."""
    dropped, drop = [], KVCache.drop_window
    monkeypatch.setattr(KVCache, "drop_window", lambda kv, seq: (dropped.append(seq), drop(kv, seq)))
    n_exact, wrong = play(zoo_q4_1_path(name), kv, False, n_seq=8, seed=1, n=60, n_windows=4)
    assert dropped
    assert n_exact >= 20
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("n_seq", [2, 4, 8])
@pytest.mark.parametrize("swa_full", [True, False])
@pytest.mark.parametrize("kv", CACHES)
@pytest.mark.parametrize("name", ALL)
def test_many_answers(
    name: str, kv: str, swa_full: bool, n_seq: int, zoo_q4_1_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """24 such settings for each kind of cache give more than 5,000 exact answers."""
    n_exact = 0
    with KVStore(tmp_path / "kv") as store:
        for seed, kept in ((2, None), (3, store)):
            n, wrong = play(zoo_q4_1_path(name), kv, swa_full, n_seq, seed, n=200, store=kept)
            n_exact += n
            assert not wrong
    assert n_exact >= 210
