"""A text that many ask for, made once for all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

_REST = 10  # times as long as making it took: making takes at most a tenth of the time


class SharedText:
    """Makes a text once for all who ask for it at the same time, and keeps it for a while.

    Args:
        make: the text, and the seconds of work that it took.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[tuple[bytes, float]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make, self._clock = make, clock
        self._task: asyncio.Task[bytes] | None = None
        self._good_until = 0.0

    async def get(self) -> bytes:
        task = self._task
        if task is None or (task.done() and self._clock() >= self._good_until):
            task = self._task = asyncio.get_running_loop().create_task(self._renew())
        return await asyncio.shield(task)  # who goes does not take it from others

    async def _renew(self) -> bytes:
        self._good_until = 0.0
        text, seconds = await self._make()
        self._good_until = self._clock() + _REST * seconds
        return text
