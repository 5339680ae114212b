"""The lock of a context: one thread at a time on its rows. Two in llama.cpp would end the process."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from mixedkv import _core

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Locked(Protocol):
    """Protocol of what uses a context: `busy` is its lock, which the `Llama` makes and all of them share."""

    busy: _core.Gate


_L = TypeVar("_L", bound=Locked)


def exclusive(method: Callable[Concatenate[_L, _P], _R]) -> Callable[Concatenate[_L, _P], _R]:
    """Make a method of `kv` that touches rows raise `ContextBusyError` where another thread does."""
    name = f"kv.{method.__name__}"

    @wraps(method)
    def guarded(self: _L, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self.busy.at_once(name):
            return method(self, *args, **kwargs)

    return guarded


def present(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Let any thread call a method that touches no rows; the context is not freed meanwhile."""

    @wraps(method)
    def guarded(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self.busy.present():
            return method(self, *args, **kwargs)

    return guarded


def waiting(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Make a method wait until no other thread uses the context."""

    @wraps(method)
    def guarded(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self.busy.waiting():
            return method(self, *args, **kwargs)

    return guarded
