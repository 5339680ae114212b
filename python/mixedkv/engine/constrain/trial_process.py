"""Compiles a constraint on trial and makes its first steps, in a process that can be ended.

`trial.py` runs this file by its path. It imports nothing of this package, so that it starts quickly. Its
first line is "ready". A request is a line of JSON; its answer is a line with the name of what was too slow,
or an empty one.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import llguidance
import numpy as np

try:
    import resource
    import signal
except ImportError:  # Windows, where only the time on the clock is bounded
    resource = signal = None  # type: ignore[assignment]

_STACK = 64 << 20  # as where constraints are compiled in earnest
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


def _slow(request: dict[str, Any]) -> str:
    """Return what is too slow for an engine's thread; "" if nothing is."""
    tokenizer = _tokenizer(tuple(request["names"]))
    limits = llguidance.LLParserLimits(**request["limits"])
    matcher = llguidance.LLMatcher(tokenizer, request["lark"], log_level=0, limits=limits)
    for _ in range(request["steps"]):
        if matcher.is_error() or matcher.is_stopped():
            return ""
        began = time.thread_time()
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(mask[:_END])
        if len(allowed):
            matcher.consume_token(int(allowed[-1]))  # often the longest way: a letter, a brace
        if time.thread_time() - began > request["step_seconds"]:
            return "step"
        if not len(allowed):
            return ""
    return ""


def _serve() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if signal is not None:  # the end of the process where it takes more
            signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        found = _slow(request)
        if signal is not None:
            signal.setitimer(signal.ITIMER_PROF, 0)
        print(found, flush=True)


def main() -> None:
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        most = int(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    threading.stack_size(_STACK)
    thread = threading.Thread(target=_serve, daemon=True)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
