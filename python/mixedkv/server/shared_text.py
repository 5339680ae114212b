"""Makes a text once for many callers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

_REST = 10  # a text is kept so many times as long as making it took


class SharedText:
    """Makes a text once for all callers at the same time, and keeps it for a while.

    Args:
        make: returns the text, and the seconds of work that it took.
    """

    def __init__(
        self, make: Callable[[], Awaitable[tuple[bytes, float]]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._make, self._clock = make, clock
        self._task: asyncio.Task[bytes] | None = None
        self._good_until = 0.0

    async def get(self) -> bytes:
        task = self._task
        if task is None or (task.done() and self._clock() >= self._good_until):
            task = self._task = asyncio.get_running_loop().create_task(self._renew())
        return await asyncio.shield(task)  # a caller that is cancelled does not cancel the others

    async def _renew(self) -> bytes:
        self._good_until = 0.0
        text, seconds = await self._make()
        self._good_until = self._clock() + _REST * seconds
        return text
