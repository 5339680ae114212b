"""What a prompt needs not compute again: tokens that are live in the cache, or stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import llama_cpp
import numpy as np

from mixedkv.config import MixedKVConfig
from mixedkv.conversation.window import Window, common_prefix
from mixedkv.store import Identity, KVStore, Match

if TYPE_CHECKING:
    from mixedkv.llama import Llama

Source = Literal["live", "ram", "disk", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reuse:
    """What was reused for one prompt.

    Args:
        n_tokens: tokens at the beginning of the prompt that were not evaluated.
        source: where they came from; "live" is the cache itself.
        exact: the cache continues as if it had never left. False where a mixed cache was cut and lacks some
            of its recent F16 rows, and where tokens of the middle are dropped.
        match: what the store has of the prompt.
        reason: why something stored was not used, "" otherwise.
    """

    n_tokens: int = 0
    source: Source = "none"
    exact: bool = True
    match: Match | None = None
    reason: str = ""


def reuse_prefix(
    llm: Llama,
    window: Window,
    store: KVStore,
    identity: Identity,
    tokens: Sequence[int],
    *,
    exact_only: bool = False,
) -> Reuse:
    """Leave in sequence 0 the longest prefix of these tokens that is live or stored, and nothing else.

    At least the last token is left to be evaluated: sampling needs its logits.
    """
    wanted = np.asarray(tokens, np.intc)[:-1]
    n_live = _live_prefix(llm, window, wanted, exact_only)
    match = store.find(identity, wanted, exact_only=exact_only) if len(wanted) else None
    reason = ""
    if match is not None and match.n_tokens > n_live:
        restored = store.restore(llm, wanted, identity=identity, exact_only=exact_only)
        if restored.hit:
            window.begin()
            return Reuse(
                n_tokens=restored.n_tokens,
                source="disk" if restored.tier == "disk" else "ram",
                exact=restored.exact,
                match=match,
                reason=restored.reason,
            )
        reason = restored.reason
        n_live = min(n_live, llm.n_tokens)  # a restore that was refused leaves nothing
    n_live = _cut(llm, n_live)
    window.begin()
    return Reuse(
        n_tokens=n_live,
        source="live" if n_live else "none",
        exact=not n_live or _recent_rows_are_hot(llm, n_live),
        match=match,
        reason=reason,
    )


def _live_prefix(llm: Llama, window: Window, wanted: np.ndarray, exact_only: bool) -> int:
    n = common_prefix(llm.input_ids[: window.whole], wanted)
    if n < llm.n_tokens and not _has_window(llm, n):
        return 0
    if exact_only and n and not _recent_rows_are_hot(llm, n):
        return 0
    return n


def _has_window(llm: Llama, n: int) -> bool:
    """Whether sliding-window layers still hold what the token at position n sees."""
    first = llama_cpp.llama_memory_seq_pos_min(llama_cpp.llama_get_memory(llm.ctx), 0)
    return first <= max(0, n - llama_cpp.llama_model_n_swa(llm.model))


def _cut(llm: Llama, n: int) -> int:
    """Remove what follows position n; returns n, or 0 where the memory cannot be cut there."""
    if not llm._ctx.kv_cache_seq_rm(0, n, -1):
        llm._ctx.kv_cache_seq_rm(0, -1, -1)
        n = 0
    llm.n_tokens = n
    return n


def _recent_rows_are_hot(llm: Llama, n: int) -> bool:
    """Whether the token at position n would find its recent rows in F16, as it does in a cache never cut."""
    config = llm.kv.config
    if not isinstance(config, MixedKVConfig) or not config.quantization_threshold:
        return True
    late = max(0, n + 1 - config.quantization_threshold)
    begin = -(-late // config.group_size) * config.group_size
    layers = [layer.il for layer in llm.kv.stats(by_layer=True).layers or () if layer.mixed]
    if begin >= n or not layers:
        return True
    hot = llm.kv.layer(layers[0]).hot(0, begin, n)
    return len(hot) == n - begin and bool(hot.all())
