"""Where this cache attends, a prompt has the same bits however it is cut and wherever its rows lie."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from mixedkv import Llama


@cache
def has_same_bits(path: Path | str, kv: str) -> bool:
    """Return whether a context of this model promises it on this processor (docs/decisions/049)."""
    with Llama(path, kv=kv, n_ctx=256, verbose=False) as llm:
        return llm.kv.stats().same_bits
