"""A prompt's logits have the same bits at once, token by token, or in any steps between."""

from __future__ import annotations

import random
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

import mixedkv
from mixedkv import Llama, _core
from mixedkv.bundled import model_path
from support.cache.hidden import hidden

STEPS = (1, 1, 2, 3, 7, 20, 33, 64, 100, 200)  # tokens, one of these each time

ISA = _core.version()["isa"]

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        ISA in ("neon", "scalar"),
        reason="promised by the kernels that multiply integers (docs/kernels.md)",
    ),
]


def logits(llm: Llama, tokens: list[int], steps: list[int]) -> np.ndarray:
    """The last token's, after steps of these lengths."""
    llm.reset()
    for at, n in zip(np.cumsum([0, *steps[:-1]]), steps, strict=True):
        llm.eval(tokens[at : at + n])
    data = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    return np.ctypeslib.as_array(data, shape=(llm.n_vocab(),)).copy()


def differing(llm: Llama, n_prompts: int, n_cuts: int, longest: int) -> list[str]:
    """Prompts and cuts whose logits are not those of the prompt at once."""
    rng = random.Random(7)
    text = "\n".join(path.read_text() for path in sorted(Path(mixedkv.__file__).parent.glob("*.py")))
    tokens = llm.tokenize(text.encode())
    found = []
    for prompt in range(n_prompts):
        n = rng.randint(2, longest) if prompt % 3 else rng.randint(2, 80)
        first = rng.randrange(len(tokens) - n)
        whole = logits(llm, tokens[first : first + n], [n])
        for _ in range(n_cuts):
            steps: list[int] = []
            while sum(steps) < n:
                steps.append(min(rng.choice(STEPS), n - sum(steps)))
            cut = logits(llm, tokens[first : first + n], steps)
            if not np.array_equal(cut.view(np.uint32), whole.view(np.uint32)):
                found.append(f"{n} tokens from {first}, steps {steps}: off by {np.abs(cut - whole).max()}")
    return found


def open_model(path: Path, kv: str) -> Llama:
    return Llama(str(path), kv=kv, n_ctx=1024, n_batch=512, n_ubatch=512, n_threads=2, verbose=False)


@pytest.mark.parametrize("rounding", ["", "8"])
@pytest.mark.parametrize(
    "kv", ["mixed", "mixed:quality", "mixed:cold=q5_0", "mixed:cold=tc3", "mixed:threshold=200,group=50"]
)
def test_any_cut_gives_the_same_bits(kv: str, rounding: str) -> None:
    if rounding and kv != "mixed:quality":
        pytest.skip("rows of 4 bits have 8 anyway")
    with hidden(rounding=rounding), open_model(model_path(), kv) as llm:
        assert differing(llm, 6, 4, 700) == []


@pytest.mark.slow
def test_any_cut_of_300_prompts_gives_the_same_bits() -> None:
    with open_model(model_path(), "mixed") as llm:
        assert differing(llm, 300, 20, 900) == []


@pytest.mark.needs("real model")
@pytest.mark.slow
def test_any_cut_gives_the_same_bits_on_a_real_model(real_model_q4_1: Path) -> None:
    with open_model(real_model_q4_1, "mixed") as llm:
        assert differing(llm, 15, 20, 900) == []
