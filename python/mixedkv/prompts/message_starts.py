"""Finds where messages of a chat begin in its tokens, whatever its template is."""

from __future__ import annotations

from typing import Any

import llama_cpp
import numpy as np

from mixedkv.prompts.overflow import Places
from mixedkv.tokens import Tokens


def message_starts(vocab: Any, tokens: Tokens) -> Places:
    """Return the positions of the first control token behind each one that ends a message; none in plain
    text.

    Args:
        vocab: llama.cpp's.
        tokens: int32 [n]; those below zero are of images.
    """
    kinds = np.unique(tokens).tolist()
    control = [t for t in kinds if t >= 0 and _attributes(vocab, t) & llama_cpp.LLAMA_TOKEN_ATTR_CONTROL]
    ends = [token for token in control if llama_cpp.llama_vocab_is_eog(vocab, token)]
    at = np.flatnonzero(np.isin(tokens, control))
    starts: Places = at[1:][np.isin(tokens[at[:-1]], ends)]
    return starts


def _attributes(vocab: Any, token: int) -> int:
    return int(llama_cpp.llama_vocab_get_attr(vocab, token))
