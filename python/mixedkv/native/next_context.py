"""Gives the next context of this thread what llama.cpp has no arguments for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mixedkv import _core


@contextmanager
def next_context(cache: _core.CacheConfig | None, n_windows: int) -> Iterator[None]:
    """Give the context that this thread makes meanwhile a mixed cache, and windows for so many sequences.

    Args:
        cache: None for one of llama.cpp's own.
        n_windows: most sequences that layers with a sliding window have room for; 0: all.
    """
    _core.limit_sliding(n_windows)
    try:
        if cache is not None:
            _core.configure_next(cache)
        yield
    finally:
        _core.limit_sliding(0)
        _core.withdraw()
