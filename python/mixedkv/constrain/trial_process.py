"""Compiles a constraint on trial and makes its first steps, in a process that can be ended.

`work/program.py` loads this file by its path. It imports nothing of this package, so that it starts quickly.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import llguidance
import numpy as np

_END = 256  # the token that ends an answer; those before it are bytes


class _Vocabulary:
    bos_token_id = None

    def __init__(self, names: Sequence[str]) -> None:
        self.tokens = [*(bytes([i]) for i in range(_END)), b"\xff<end>"]
        self.tokens += [b"\xff" + name.encode() for name in names]
        self.eos_token_id, self.special_token_ids = _END, list(range(_END, len(self.tokens)))

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("nothing is tokenized")


@lru_cache(maxsize=8)
def _tokenizer(names: tuple[str, ...]) -> Any:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Vocabulary(names)), eos_token=[_END])


def tried(request: dict[str, Any], data: bytes = b"") -> tuple[dict[str, Any], bytes]:
    """Return whether a step is too slow for an engine's thread."""
    tokenizer = _tokenizer(tuple(request["names"]))
    limits = llguidance.LLParserLimits(**request["limits"])
    matcher = llguidance.LLMatcher(tokenizer, request["lark"], log_level=0, limits=limits)
    for _ in range(request["steps"]):
        if matcher.is_error() or matcher.is_stopped():
            return {"slow": False}, b""
        began = time.thread_time()
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(mask[:_END])
        if len(allowed):
            matcher.consume_token(int(allowed[-1]))  # often the longest way: a letter, a brace
        if time.thread_time() - began > request["step_seconds"]:
            return {"slow": True}, b""
        if not len(allowed):
            return {"slow": False}, b""
    return {"slow": False}, b""
