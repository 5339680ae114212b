"""Checks and claims the models that an engine uses alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from mixedkv.llama import Llama


def check_model(llm: Llama, parallel: int | None) -> int:
    """Return how many answers are made at a time: `parallel`, or half of the sequences, but no more than
    layers with a sliding window have room for.

    Raises:
        ValueError: the `Llama` was not made for an engine, or `parallel` is too large; the message says how
            to make it.
    """
    n_seq = llm.context_params.n_seq_max
    if not llm.context_params.kv_unified or n_seq < 2:
        raise ValueError(
            f"an engine needs sequences that share one cache, and this Llama has n_seq_max={n_seq} and "
            f"kv_unified={bool(llm.context_params.kv_unified)}: make it with Llama(..., n_seq_max=16, "
            f"kv_unified=True)"
        )
    parallel = n_seq // 2 if parallel is None else parallel
    if not 1 <= parallel < min(n_seq, llm.n_batch + 1):
        raise ValueError(
            f"parallel={parallel}: use fewer than the context's {n_seq} sequences (n_seq_max), "
            f"and n_batch={llm.n_batch} at most"
        )
    return min(parallel, llm.n_windows or parallel)


def lend(models: Sequence[Llama], close: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Refuse other callers that evaluate with these models, and have the models call `close` before they
    close.
    """
    for llm in models:
        llm.lend(True)
        llm.at_close(lambda: (function := close()) and function())
