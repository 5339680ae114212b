"""The lock of a context: one thread at a time on its rows. Two in llama.cpp would end the process."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from mixedkv import _core
from mixedkv.limits import whole

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Locked(Protocol):
    """Protocol of what uses a context: `busy` is its lock, which the `Llama` makes and all of them share."""

    busy: _core.Gate


_L = TypeVar("_L", bound=Locked)


def exclusive(method: Callable[Concatenate[_L, _P], _R]) -> Callable[Concatenate[_L, _P], _R]:
    """Make a method of `kv` that touches rows raise `ContextBusyError` where another thread does.

    Its arguments are checked by their annotations: whole numbers, llama.cpp's int32, and objects.
    """
    name = f"kv.{method.__name__}"
    parameters = list(inspect.signature(method, eval_str=True).parameters.values())[1:]
    kinds = {each.name: each.annotation for each in parameters}

    @wraps(method)
    def guarded(self: _L, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        given: list[Any] = [*map(_checked, kinds, kinds.values(), args), *args[len(kinds) :]]
        named: Any = {each: _checked(each, kinds.get(each), value) for each, value in kwargs.items()}
        with self.busy.at_once(name):
            return method(self, *given, **named)

    return guarded


def _checked(name: str, kind: Any, value: Any) -> Any:
    """Return an argument, a whole number as an int."""
    if kind is int or (kind == int | None and value is not None):
        return whole(name, value)
    if inspect.isclass(kind) and kind.__module__.startswith("mixedkv") and not isinstance(value, kind):
        raise TypeError(f"{name}={value!r}: use a {kind.__name__}")
    return value


def present(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Let any thread call a method that touches no rows; the context is not freed meanwhile."""

    @wraps(method)
    def guarded(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self.busy.present():
            return method(self, *args, **kwargs)

    return guarded
