"""Carries events from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mixedkv.engine.inbox import deliver_directly
from mixedkv.engine.jobs.events import Event
from mixedkv.engine.jobs.job import Job


class Delivery:
    """An engine's `deliver`, which wakes the running event loop once for all events of a step. Before the
    loop runs, while prompts are warmed, events are delivered directly; after it they are dropped.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over = False

    def __call__(self, events: Sequence[tuple[Job, Event]]) -> None:
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(deliver_directly, events)
        elif not self._over:
            deliver_directly(events)

    def begin(self) -> None:
        """Deliver all events to the running loop from now on."""
        self._loop = asyncio.get_running_loop()

    def end(self) -> None:
        """Drop events from now on."""
        self._over = True
        self._loop = None
