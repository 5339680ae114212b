"""Measures how far one distribution of the next token is from another."""

from __future__ import annotations

from dataclasses import dataclass

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv.llama import Llama
from mixedkv.native import llama_cpp as _llama_cpp

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Deviation:
    """The deviation of the distribution after a prompt.

    Args:
        kld: KL divergence of the distribution with reuse from that of a full evaluation, in nats.
        same_top1: both distributions have the same likeliest token.
    """

    kld: float
    same_top1: bool


def last_logits(llm: Llama) -> Logits:
    """Return a copy of the logits of the token that was evaluated last, float32 [n_vocab]."""
    return logits_at(llm, -1)


def logits_at(llm: Llama, index: int) -> Logits:
    """Return a copy of the logits of a token of the last batch, float32 [n_vocab]."""
    pointer = llama_cpp.llama_get_logits_ith(_llama_cpp.context(llm), index)
    return np.array(np.ctypeslib.as_array(pointer, (llm.n_vocab(),)), np.float32)


def compare(exact: Logits, other: Logits) -> Deviation:
    p, q = _log_softmax(exact), _log_softmax(other)
    kld = float(np.sum(np.exp(p) * (p - q)))
    return Deviation(max(0.0, kld), bool(exact.argmax() == other.argmax()))


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64) - logits.max()
    result: npt.NDArray[np.float64] = wide - np.log(np.exp(wide).sum())
    return result


def follow(llm: Llama, n: int, forced: list[int] | None = None) -> tuple[list[int], list[Logits]]:
    """Generate n tokens from where the `Llama` stands, the likeliest or the `forced` ones. Return them, and
    the logits that each was chosen from.
    """
    tokens: list[int] = []
    logits = [last_logits(llm)]
    for i in range(n):
        tokens.append(int(logits[-1].argmax()) if forced is None else forced[i])
        if i + 1 < n:
            llm.eval([tokens[-1]])
            logits.append(last_logits(llm))
    return tokens, logits
