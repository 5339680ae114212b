"""One thread at a time on the rows of a context: two in llama.cpp would end the process."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from mixedkv import _core

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Guarded(Protocol):
    @property
    def busy(self) -> _core.Gate: ...


_G = TypeVar("_G", bound=_Guarded)


def exclusive(method: Callable[Concatenate[_G, _P], _R]) -> Callable[Concatenate[_G, _P], _R]:
    """Make a method that touches rows raise `ContextBusyError` where another thread does."""
    name = f"kv.{method.__name__}"

    @wraps(method)
    def guarded(self: _G, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self.busy.at_once(name):
            return method(self, *args, **kwargs)

    return guarded


def present(method: Callable[Concatenate[_G, _P], _R]) -> Callable[Concatenate[_G, _P], _R]:
    """Let any thread call a method that touches no rows; the context is not freed meanwhile."""

    @wraps(method)
    def guarded(self: _G, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self.busy.present():
            return method(self, *args, **kwargs)

    return guarded
