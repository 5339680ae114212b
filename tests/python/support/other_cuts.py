"""How much the cuts of a prompt matter: the same tokens evaluated in other steps, and nothing reused."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mixedkv import Llama
from mixedkv.chunks.gate import logits_at


class OtherCuts:
    """A context of its own."""

    def __init__(self, model: Path, kv: str, n_ctx: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.llm = Llama(
                model,
                kv=kv,
                n_ctx=n_ctx,
                n_batch=512,
                n_ubatch=512,
                n_threads=1,
                n_threads_batch=1,
                verbose=False,
            )

    def spread(self, prompt: Sequence[int], answer: Sequence[int], other: int, n: int = 12) -> float:
        """Return how far apart log-probabilities of an answer lie, in nats, when its prompt is cut otherwise.

        Args:
            prompt: its tokens, cut at 1 to 8 random places in each evaluation.
            answer: tokens that are evaluated one by one behind it.
            other: a token that could stand where the last one of the answer does.
            n: evaluations.
        """
        rng = random.Random(len(prompt))
        found = [self._logprobs(prompt, answer, other, rng.choice((1, 3, 8)), rng) for _ in range(n)]
        return float(np.ptp(np.stack(found), axis=0).max())

    def _logprobs(
        self, prompt: Sequence[int], answer: Sequence[int], other: int, n_cuts: int, rng: random.Random
    ) -> npt.NDArray[np.float64]:
        self.llm.kv.clear()
        self.llm.reset()
        cuts = [0, *sorted(rng.sample(range(1, len(prompt)), n_cuts)), len(prompt)]
        for begin, end in pairwise(cuts):
            self.llm.eval(prompt[begin:end])
        found: list[float] = []
        for i, token in enumerate(answer):
            logits = logits_at(self.llm, -1).astype(np.float64)
            logits -= np.logaddexp.reduce(logits)
            found.append(logits[token])
            if i == len(answer) - 1:
                found.append(logits[other])
            else:
                self.llm.eval([token])
        return np.array(found)

    def close(self) -> None:
        self.llm.close()
