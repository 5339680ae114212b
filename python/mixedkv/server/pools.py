"""Thread pools for slow work, one for each kind, so that much work of one kind does not delay the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from mixedkv.engine.schedule.tenant_limits import Limits, unlimited
from mixedkv.server.body_reader import BodyReader
from mixedkv.server.fair_pool import FairPool

LARGE = 1 << 16  # bytes of a large body; a smaller one takes a millisecond
_T = TypeVar("_T")


class Pools:
    """Thread pools for work off the event loop. Sessions use the loop's own threads, so that a database that
    does not answer delays no other work.

    Args:
        limits: returns the limits of a tenant, of which the weight counts where prompts are prepared.
    """

    def __init__(self, limits: Limits = unlimited) -> None:
        self.bodies = ThreadPoolExecutor(1, "mixedkv-body")  # large ones, which the reader reads
        self.body_reader = BodyReader()
        self.prompts = FairPool(3, "mixedkv-prompt", limits)  # templates, tokens, schemas
        self.large_prompts = FairPool(1, "mixedkv-large-prompt", limits)
        self.answers = ThreadPoolExecutor(1, "mixedkv-answer")  # large ones to encode

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *_: object) -> None:
        """Drop waiting work, and wait for running work, which uses the model that is freed next."""
        self.body_reader.close()
        for executor in (self.bodies, self.answers):
            executor.shutdown(cancel_futures=True)
        for pool in (self.prompts, self.large_prompts):
            pool.close()


async def in_pool(pool: ThreadPoolExecutor, function: Callable[..., _T], *args: Any) -> _T:
    """Run a function on a pool's thread, off the event loop."""
    return await asyncio.get_running_loop().run_in_executor(pool, function, *args)
