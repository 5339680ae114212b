"""Numbers that llama.cpp sets, each in this one place."""

from __future__ import annotations

INT32_MAX = 2**31 - 1  # positions, tokens and counts are int32
MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
MAX_SNAPSHOTS = 64  # of a recurrent state; each takes the memory of one
CELLS = 256  # a context is a multiple of so many tokens


def padded(n_ctx: int) -> int:
    """Return the context that llama.cpp makes of `n_ctx` tokens: rounded up to whole `CELLS`."""
    return -(-n_ctx // CELLS) * CELLS
