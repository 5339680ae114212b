"""A context that begins every prompt anew."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv import Llama
from mixedkv.engine.answer import Answer


class FreshContext:
    def __init__(self, path: Path, kv: str, n_ctx: int) -> None:
        self.llm = Llama(path, kv=kv, n_ctx=n_ctx, n_threads=1, n_threads_batch=1, verbose=False)

    def off(self, prompt: list[int], answer: Answer) -> float:
        """Return how far the log-probabilities of an answer's tokens are from this context's at most."""
        self.llm.reset()
        self.llm.kv.clear()
        self.llm.eval(prompt)
        worst = 0.0
        for told in answer.result().logprobs:
            logits = self.logits()
            top = logits.max()
            expected = logits[told.token] - top - np.log(np.exp(logits - top).sum())
            worst = max(worst, abs(told.logprob - float(expected)))
            self.llm.eval([told.token])
        return worst

    def logits(self) -> npt.NDArray[np.float32]:
        n = self.llm.n_vocab()
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.llm.ctx, -1), (n,)).copy()
