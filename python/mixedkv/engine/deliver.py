"""Brings the events of a step to the callbacks of its jobs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from mixedkv.engine.jobs.events import Event
from mixedkv.engine.jobs.job import Job

log = logging.getLogger("mixedkv.engine")

Deliver = Callable[[Sequence[tuple[Job, Event]]], None]


def deliver_directly(events: Sequence[tuple[Job, Event]]) -> None:
    """Deliver events on this thread. A callback that raises does not affect other jobs."""
    for job, event in events:
        try:
            job.deliver(event)
        except Exception:
            log.exception("an event could not be delivered")


class Outbox:
    """Collects the events of a step and hands them out together after it."""

    def __init__(self, deliver: Deliver) -> None:
        self.deliver = deliver
        self._events: list[tuple[Job, Event]] = []

    def put(self, *events: tuple[Job, Event]) -> None:
        self._events += events

    def flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            try:
                self.deliver([(job, event) for job, event in events if not job.cancelled])
            except Exception:
                log.exception("events could not be delivered")
