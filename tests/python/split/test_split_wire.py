"""What the precision of the wire does to the answers of a real model: docs/split.md has the figures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.real_text import KINDS, read_real_text
from mixedkv.split.client import SplitClient
from mixedkv.split.export import Exported
from mixedkv.split.head import Head
from support import split_support

_PROMPTS = int(os.environ.get("PROMPTS", "3"))  # of the four kinds of text in turn
_N_PROMPT, _N_ANSWER = 96, 24
_PRECISIONS = ("f32", "f16")


def _prompts(llm: Llama) -> Iterator[list[int]]:
    texts = [llm.tokenize(read_real_text(kind).text[:100_000].encode(), add_bos=False) for kind in KINDS]
    for i in range(_PROMPTS):
        text = texts[i % len(texts)]
        at = (i + 1) * (len(text) - _N_PROMPT) // (_PROMPTS + 1)
        yield text[at : at + _N_PROMPT]


def _log_p(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return np.asarray(wide - np.logaddexp.reduce(wide, axis=1, keepdims=True))


def _alone(model: Path, kv: str) -> tuple[list[list[int]], list[list[int]], list[np.ndarray]]:
    """Prompts, the answers of `Llama` alone, and its distributions along them."""
    options = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "logits_all": True, "verbose": False}
    with Llama(model, kv=kv, **options) as llm:
        prompts = list(_prompts(llm))
        answers, rows = [], []
        for prompt in prompts:
            answers.append(split_support.local_tokens(llm, prompt, _N_ANSWER))
            llm.reset()
            llm.kv.clear()
            llm.eval([*prompt, *answers[-1]])
            rows.append(_log_p(llm.scores[_N_PROMPT - 1 : llm.n_tokens]))
    return prompts, answers, rows


@pytest.fixture(scope="module", params=["real_model", "real_model_q4_1"])
def halves(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Exported]:
    """A model, and its head and body."""
    path: Path = request.getfixturevalue(request.param)
    return path, split_support.split(path, tmp_path_factory.mktemp(request.param))


def _gap(log_p: np.ndarray, answer: list[int], found: list[int]) -> float:
    """Between the log probabilities of the first two tokens that differ; 0 for the same answers."""
    at = next((i for i, pair in enumerate(zip(answer, found, strict=False)) if pair[0] != pair[1]), None)
    return 0.0 if at is None else abs(float(log_p[at, answer[at]] - log_p[at, found[at]]))


@pytest.mark.parametrize("kv", ["f16", "mixed:threshold=32,group=8"])
def test_answers_of_a_real_model(halves: tuple[Path, Exported], kv: str) -> None:
    path, parts = halves
    prompts, answers, alone = _alone(path, kv)
    for precision in _PRECISIONS:
        same, gaps, klds, first = 0, [], [], []
        with (
            Head(parts.head, n_threads=1) as head,
            split_support.running(parts.body, kv=kv, n_ctx=512) as server,
            SplitClient(head, server.address, precision=precision) as client,
        ):
            for prompt, answer, wanted in zip(prompts, answers, alone, strict=True):
                with client.session() as session:
                    found = list(session.generate_tokens(prompt, max_tokens=_N_ANSWER, temperature=0))
                same += found == answer
                gaps.append(_gap(wanted, answer, found))
                with client.session() as session:
                    got = _log_p(head.logits(session._evaluate([*prompt, *answer], len(answer) + 1)))
                klds.append((np.exp(wanted) * (wanted - got)).sum(axis=1))
                first.append(wanted.argmax(axis=1) == got.argmax(axis=1))
        kld, top = float(np.concatenate(klds).mean()), float(np.concatenate(first).mean())
        print(
            f"{path.stem}, {kv}, wire {precision}: {same} of {len(prompts)} answers the same, KLD {kld:.1e} "
            f"(largest {np.concatenate(klds).max():.1e}), {100 * top:.2f}% of first choices, "
            f"gaps {max(gaps):.1e}"
        )
        # products of quantised weights are in 8 bits: rounding a vector changes as much as anything does
        rounded = precision == "f16" and "Q4_1" in path.stem
        assert kld < (1e-2 if rounded else 1e-6)
        assert top > (0.93 if rounded else 0.999)
        if not rounded:  # the server keeps F16 rows in another order: sums round otherwise
            assert max(gaps) < (1e-6 if kv == "f16" else 0.1), gaps
