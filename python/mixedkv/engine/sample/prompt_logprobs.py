"""Gathers the log probabilities of a prompt's tokens while the prompt is evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mixedkv.engine.sample.sampler import TokenLogprob, logits_row, logprob_of
from mixedkv.tokens import Tokens

_MAX_LOGITS = 1 << 24  # logits that llama.cpp may hold for one step: 64 MB


class PromptLogprobs:
    """Log probabilities of one prompt, gathered as it is evaluated from its first token on.

    Args:
        prompt: token ids.
        n_top: how many of the likeliest tokens to return at each position.

    Attributes:
        most: maximum number of tokens in one step.
        found: the log probabilities of the tokens from the second one on, each with the token's rank by
            probability, from 1.
    """

    def __init__(self, prompt: Sequence[int] | Tokens, n_top: int, n_vocab: int) -> None:
        self._prompt, self._n_top, self._n_vocab = np.asarray(prompt).tolist(), n_top, n_vocab
        self.most = max(1, _MAX_LOGITS // n_vocab)
        self.found: list[tuple[TokenLogprob, int]] = []

    def wants(self, p0: int) -> bool:
        """Return whether log probabilities of positions from `p0` on are still missing."""
        return p0 < len(self._prompt) - 1

    def take(self, context: Any, index: int, p0: int, n: int) -> None:
        """Read the logits of the prompt's positions p0 to p0 + n, which are in the batch from `index` on.
        Known positions are skipped, since a job that lost its rows evaluates them again.
        """
        for p in range(max(p0, len(self.found)), min(p0 + n, len(self._prompt) - 1)):
            row, token = logits_row(context, index + p - p0, self._n_vocab), self._prompt[p + 1]
            logprob = logprob_of(row, token, self._n_top)
            self.found.append((logprob, int((row > row[token]).sum()) + 1))
