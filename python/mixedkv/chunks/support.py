"""Refuses models, caches and methods with which chunks cannot be reused, and says why."""

from __future__ import annotations

from mixedkv.chunks.repair import Method
from mixedkv.errors import UnsupportedModelError
from mixedkv.llama import Llama
from mixedkv.store import Identity


def check_memory(llm: Llama) -> None:
    """Refuse a context whose rows cannot be put together.

    Raises:
        UnsupportedModelError: the context keeps more than rows of tokens.
    """
    if not llm.kv.can_cut:
        raise UnsupportedModelError(
            "chunks: recurrent and hybrid models keep a state of the whole sequence, of which no part can be "
            "used elsewhere. Reuse prefixes"
        )


def check_model(llm: Llama, identity: Identity, chunk_size: int) -> None:
    """Refuse a model whose rows cannot be moved.

    Raises:
        UnsupportedModelError: rows of this model, or of this context, cannot be moved.
    """
    window = identity.sliding_window
    if window and window < chunk_size:
        raise UnsupportedModelError(
            f"chunks: the sliding window of {window} tokens is shorter than chunk_size={chunk_size}: its "
            f"layers read little of a chunk from within it. Reuse prefixes, or set a smaller chunk_size"
        )
    if not llm.kv.can_shift:
        raise UnsupportedModelError(
            "chunks: positions cannot be moved here. Sliding-window layers keep the rows of a whole chunk "
            "with swa_full=True; a quantised uniform cache turns whole heads only, use a mixed one or f16"
        )


def check_method(llm: Llama, method: Method) -> None:
    """Refuse a repair method that the context's attention cannot serve.

    Raises:
        UnsupportedModelError: the method needs attention weights, which only the fused attention shows.
    """
    layers = llm.kv.stats(by_layer=True).layers or ()
    if method.repair == "cacheblend" and not all(layer.head_size_v for layer in layers):
        raise UnsupportedModelError(
            "repair='cacheblend' compares values, and latent attention (MLA) stores none: use repair='query' "
            "or repair='seam'"
        )
    fused = all(layer.fused for layer in layers)
    if method.repair in ("query", "cacheblend") and not fused:
        raise UnsupportedModelError(
            f"repair={method.repair!r} watches the fused attention, which this cache does not have "
            f"({llm.kv.config}). Use a mixed cache in CPU memory, or repair='seam'"
        )
