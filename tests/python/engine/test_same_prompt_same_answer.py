"""The same prompt again on an idle engine, greedily: the same answer, to the bit."""

from __future__ import annotations

import pytest

from mixedkv.bundled.corpus import make_recall
from support.servers.server import Direct

pytestmark = pytest.mark.full

WINDOWS_FOR_ALL = True  # F16 rows for every sequence, whatever they take

N = 60


def ask(direct: Direct, prompt: list[int]) -> tuple[int, list[int], list[list[tuple[int, float]]]]:
    """Rows that were there, the answer's tokens, and their logprobs with those of the next ones."""
    job, done = direct.answer(prompt, N, ignore_end=True, n_logprobs=3)
    assert job.exact
    return job.n_cached or 0, list(job.tokens[job.n_prompt :]), [one.top.tolist() for one in done.logprobs]


@pytest.mark.parametrize("kv", ["f16", "mixed"])
def test_the_answer_has_the_same_bits(kv: str) -> None:
    """At once, and after others have had the rows of its window; by default these share theirs."""
    with Direct(kv=kv, parallel=2, idle=6) as direct:
        prompts = [direct.tokens(make_recall(80 + i, 20).prompt)[: 150 + 9 * i] for i in range(6)]
        first = []
        for prompt in prompts:
            first.append(ask(direct, prompt))
            assert ask(direct, prompt) == (len(prompt) - 1, *first[-1][1:])
        for prompt, (_, *answer) in zip(prompts, first, strict=True):
            assert ask(direct, prompt) == (len(prompt) - 1, *answer)
