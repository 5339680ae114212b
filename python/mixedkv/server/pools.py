"""Threads for work that takes a while, apart by kind: who fills one kind's makes nobody else wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from mixedkv.server.body_reader import BodyReader

LARGE = 1 << 16  # bytes of a body; less takes a millisecond
_T = TypeVar("_T")


class Pools:
    """Threads for work off the event loop. Sessions use the loop's own threads: a database that does not
    answer holds up no other work.
    """

    def __init__(self) -> None:
        self.bodies = ThreadPoolExecutor(1, "mixedkv-body")  # large ones, which the reader reads
        self.body_reader = BodyReader()
        self.prompts = ThreadPoolExecutor(2, "mixedkv-prompt")  # templates, tokens, schemas
        self.large_prompts = ThreadPoolExecutor(1, "mixedkv-large-prompt")
        self.answers = ThreadPoolExecutor(1, "mixedkv-answer")  # large ones to encode

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *_: object) -> None:
        """Drop what waits, and wait for what runs: it reads the model, which is freed next."""
        self.body_reader.close()
        for pool in (self.bodies, self.prompts, self.large_prompts, self.answers):
            pool.shutdown(cancel_futures=True)


async def in_pool(pool: ThreadPoolExecutor, function: Callable[..., _T], *args: Any) -> _T:
    """Run a function on a pool's thread, off the event loop."""
    return await asyncio.get_running_loop().run_in_executor(pool, function, *args)
