"""Numbers that llama.cpp sets, and ranges of settings of sampling, each in this one place."""

from __future__ import annotations

INT32_MAX = 2**31 - 1  # positions, tokens and counts are int32
MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
MAX_SNAPSHOTS = 64  # of a recurrent state; each takes the memory of one
CELLS = 256  # a context is a multiple of so many tokens

RANGES: dict[str, tuple[float, float]] = {  # of settings of sampling: in Python, schemas, settings, options
    "temperature": (0, 100),
    "top_k": (0, INT32_MAX),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "top_n_sigma": (-1, 1000),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "dynatemp_range": (0, 100),
    "dynatemp_exponent": (0, 100),
    "dry_multiplier": (0, 100),
    "dry_base": (0, 100),
    "dry_allowed_length": (1, INT32_MAX),
    "dry_penalty_last_n": (-1, INT32_MAX),
    "mirostat": (0, 2),
    "mirostat_tau": (0, 100),
    "mirostat_eta": (0, 1),
    "adaptive_target": (-1, 1),
    "adaptive_decay": (0, 0.99),
    "repeat_penalty": (0.01, 100),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "seed": (0, 2**32 - 1),
}


def padded(n_ctx: int) -> int:
    """Return the context that llama.cpp makes of `n_ctx` tokens: rounded up to whole `CELLS`."""
    return -(-n_ctx // CELLS) * CELLS
