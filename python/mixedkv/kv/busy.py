"""One thread at a time on the rows of a context: llama.cpp has no locks, two would end the process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from mixedkv.errors import ContextBusyError

_P = ParamSpec("_P")
_R = TypeVar("_R")


class BusyGuard:
    """Held while rows are evaluated, moved or read; the thread that holds it may enter again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Enter as soon as no other thread is there."""
        with self._lock:
            yield

    @contextmanager
    def at_once(self, what: str) -> Iterator[None]:
        """Enter now.

        Raises:
            ContextBusyError: another thread is there.
        """
        if not self._lock.acquire(blocking=False):
            raise ContextBusyError(
                f"{what}: another thread is using this context, and llama.cpp takes one at a time: call it "
                f"on the thread that evaluates, with an engine through Engine.call, or again later"
            )
        try:
            yield
        finally:
            self._lock.release()


class _Guarded(Protocol):
    @property
    def busy(self) -> BusyGuard: ...


_G = TypeVar("_G", bound=_Guarded)


def exclusive(method: Callable[Concatenate[_G, _P], _R]) -> Callable[Concatenate[_G, _P], _R]:
    """A method that touches rows: `ContextBusyError` where another thread does."""

    @wraps(method)
    def guarded(self: _G, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self.busy.at_once(f"kv.{method.__name__}"):
            return method(self, *args, **kwargs)

    return guarded
