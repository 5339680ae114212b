"""How far a cache is from another one: next-token distributions of the same tokens."""

from __future__ import annotations

import numpy as np

from support.cache.harness import Ctx, Mixed, Model, Uniform


def log_p(model: Model, kv: Uniform | Mixed, tokens: list[int]) -> np.ndarray:
    with Ctx(model, kv, n_ctx=len(tokens)) as ctx:
        logits = ctx.decode(tokens).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def divergence(want: np.ndarray, got: np.ndarray) -> tuple[float, float]:
    """Mean KL divergence, and the share of equal first choices."""
    kld = (np.exp(want) * (want - got)).sum(axis=1).mean()
    return float(kld), float((want.argmax(axis=1) == got.argmax(axis=1)).mean())
