"""The work that a thread is doing: whose it is, and whether anybody still waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class GivenUpError(Exception):
    """Nobody waits for this work any more."""


class Work:
    """Work for a tenant, which another thread may cancel.

    Args:
        tenant: whose turns it takes.
    """

    def __init__(self, tenant: str = "") -> None:
        self.tenant = tenant
        self._given_up = False
        self._ends: list[Callable[[], object]] = []
        self._changing = threading.Lock()

    def give_up(self) -> None:
        """End what the work waits for, and have it end itself where it looks next."""
        with self._changing:  # an end does not reach the work after this one
            self._given_up = True
            for end in self._ends:
                end()

    def check(self) -> None:
        """Check whether anybody still waits for the work.

        Raises:
            GivenUpError: nobody does.
        """
        if self._given_up:
            raise GivenUpError

    @contextmanager
    def ended_by(self, end: Callable[[], object]) -> Iterator[None]:
        """Call `end` when the work is given up within this block, on the thread that gives it up.

        Raises:
            GivenUpError: it was before.
        """
        with self._changing:
            self.check()
            self._ends.append(end)
        try:
            yield
        finally:
            with self._changing:
                self._ends.remove(end)


_current: ContextVar[Work] = ContextVar("mixedkv-work")


def current() -> Work:
    """Return the work of this thread; outside of a pool, work of nobody that is never given up."""
    return _current.get(None) or Work()


@contextmanager
def at(work: Work) -> Iterator[None]:
    """Make this the thread's current work."""
    token = _current.set(work)
    try:
        yield
    finally:
        _current.reset(token)
