"""Facts of a context for a row: the cache's bytes, and who reads its rows."""

from __future__ import annotations

from typing import TypedDict

from mixedkv_bench.harness.contexts import CannotRunError, Context


class CacheFacts(TypedDict, total=False):
    """Fields of a row of a cache."""

    kv_bytes: int
    bits_per_element: float | None
    attention: str


def of_context(context: Context) -> CacheFacts:
    """Return kv_bytes from llama.cpp's own memory breakdown, bits_per_element and attention; of our library
    only.

    Raises:
        CannotRunError: the model keeps no keys and values.
    """
    from mixedkv import _core

    path = attention(context)
    stats = _core.stats(context.address)
    n = stats["n_elements"]
    return {
        "kv_bytes": stats["bytes_total"],
        "bits_per_element": round(8 * stats["bytes_total"] / n, 4) if n else None,
        "attention": path,
    }


def attention(context: Context) -> str:
    """Return who reads the rows, as `LayerStats.attention`; where layers differ, names joined by "+".

    Raises:
        CannotRunError: the model keeps no keys and values.
    """
    from mixedkv import _core
    from mixedkv.kv.layer_view import layer_stats

    try:
        layers = _core.layers(context.address)
    except LookupError:
        raise CannotRunError("the model keeps no keys and values: it has no cache to measure") from None
    paths = {layer_stats(x).attention for x in layers}
    return "+".join(sorted(paths)) or "llama.cpp"
