"""One prompt, one answer: on a server that has been used, beside other requests and after rows were reused or
restored, an answer that counts as exact has the log-probabilities of a fresh context.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mixedkv import Llama, _core
from mixedkv.bundled import model_path
from mixedkv.engine.prompt_cache import PromptCache
from mixedkv.store import KVStore
from support.cache.fresh_context import FreshContext

N_CTX = 2048
# of a logarithm of a sum, and of rows in F16. An element of a Q4_0 row on another level changes 1e-3
ROUNDING = 1e-4
# F16 rows in the place of cold ones depend on how a prompt is cut
KINDS = ("mixed", "mixed:quality", "mixed:cold=q5_0", "q8_0:attention=fused")

ISA = _core.version()["isa"]

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(ISA == "neon", reason="NEON's prefill has sums of its own (docs/kernels.md)"),
]


def prompt_of(rng: random.Random, before: list[list[int]], n_words: int) -> list[int]:
    """Return a prompt that is new, or goes on from one before."""
    begin: list[int] = []
    if before and rng.random() < 0.6:
        other = rng.choice(before[-20:])
        begin = other[: rng.randint(1, len(other))]
    return begin[:400] + rng.choices(range(3, n_words), k=rng.choice([5, 40, 200]))


def differing(kv: str, store: KVStore | None, n_before: int, n: int) -> tuple[int, list[str]]:
    """Return how many of `n` answers were exact after `n_before` others, and those that differ."""
    rng, found, n_exact = random.Random(3), list[str](), 0
    options = {"kv": kv, "n_ctx": N_CTX, "n_threads": 2, "n_threads_batch": 2, "verbose": False}
    llm = Llama(model_path(), n_seq_max=6, kv_unified=True, n_batch=256, **options)
    fresh = FreshContext(model_path(), kv, N_CTX)
    with llm, fresh.llm, PromptCache(llm, store, parallel=3) as cache:
        before: list[list[int]] = []
        left = n_before + n
        while left > 0:
            some = [prompt_of(rng, before, llm.n_vocab()) for _ in range(min(left, rng.randint(1, 4)))]
            jobs = [
                (
                    prompt,
                    cache.engine.submit(prompt, max_tokens=rng.randint(1, 6), temperature=0, n_logprobs=1),
                )
                for prompt in some
            ]
            for prompt, answer in jobs:
                answer.result()
                if left <= n and answer.job.exact:
                    n_exact += 1
                    off = fresh.off(prompt, answer)
                    if off > ROUNDING:
                        found.append(f"{len(prompt)} tokens, {answer.job.n_evaluated} evaluated: {off:.6f}")
            before += some
            left -= len(some)
    return n_exact, found


@pytest.mark.parametrize("kv", KINDS)
def test_answers_on_a_used_server_are_those_of_a_fresh_context(kv: str, tmp_path: Path) -> None:
    with KVStore(tmp_path / "kv") as store:
        n_exact, found = differing(kv, store, 40, 20)
    assert found == []
    assert n_exact >= 10


@pytest.mark.nightly
@pytest.mark.parametrize("kv", KINDS)
def test_200_prompts_after_500_requests(kv: str, tmp_path: Path) -> None:
    with KVStore(tmp_path / "kv") as store:
        n_exact, found = differing(kv, store, 500, 200)
    print(kv, n_exact)
    assert found == []
    assert n_exact >= 100
