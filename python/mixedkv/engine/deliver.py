"""How the events of a step reach who asked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from mixedkv.engine.job import Event, Job

log = logging.getLogger("mixedkv.engine")

Deliver = Callable[[Sequence[tuple[Job, Event]]], None]


def deliver_directly(events: Sequence[tuple[Job, Event]]) -> None:
    """On this thread. Whose `deliver` fails takes no other job's events away."""
    for job, event in events:
        try:
            job.deliver(event)
        except Exception:
            log.exception("an event could not be delivered")
