"""The one lock of a context: one thread at a time on its rows. Two in llama.cpp would end the process."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from mixedkv import _core
from mixedkv.errors import ClosedError, ContextBusyError
from mixedkv.limits import check_int

_P = ParamSpec("_P")
_R = TypeVar("_R")


class ContextGate:
    """The way into a context, which it outlives. Whoever uses a context does so within `acquire` or `pin`.

    `with gate.acquire():` waits until no other thread uses the context, and releases it at the block's end;
    `with gate.acquire("kv.remove"):` raises ContextBusyError, which names what was to be done, in place of
    waiting. `with gate.pin():` shares it with other threads: it is only not freed meanwhile. A thread that is
    inside may enter again. After `close` all of them raise ClosedError, but on threads that are inside.

    Entering and leaving is native, so no signal's handler runs between taking the lock and the block.
    """

    def __init__(self) -> None:
        self._native = _core.Gate()
        self._closing = threading.RLock()  # who closes second waits for the first
        self._at_close: list[Callable[[], object]] = []
        self._lent = False

    def open(self, context: int) -> None:
        """Let threads in: from now on there is a context, whose own lock is taken too, for callers of the C
        API.
        """
        self._native.open(context)

    def acquire(self, or_refuse: str = "") -> _core.Turn:
        return self._native.at_once(or_refuse) if or_refuse else self._native.waiting()

    def pin(self) -> _core.Turn:
        return self._native.present()

    @property
    def is_closing(self) -> bool:
        """True once `close` lets nobody in any more."""
        return self._native.refuses

    @property
    def is_empty(self) -> bool:
        """True if no thread is inside."""
        return self._native.empty

    def lend(self, lent: bool) -> None:
        """Say whether an engine evaluates here: `check_own` then refuses all others, on each thread."""
        self._lent = lent

    def check_own(self, what: str) -> None:
        """Refuse to evaluate in a context that is lent.

        Raises:
            ContextBusyError: it is.
        """
        if self._lent:
            raise ContextBusyError(
                f"{what}: an Engine uses this Llama, and answers by Engine.submit: close it first"
            )

    def check_open(self) -> None:
        """Raise ClosedError on a thread that is inside while another one closes."""
        if self.is_closing:
            raise ClosedError("this Llama was closed while it evaluated")

    def at_close(self, function: Callable[[], object]) -> None:
        """Have `close` call a function before it lets nobody in any more; the last one first."""
        self._at_close.append(function)

    def close(self, stop: Callable[[], object], free: Callable[[], object]) -> None:
        """Let nobody in any more, wait until all have left, and free the context. Can be called again.

        Args:
            stop: ends what a thread inside evaluates.
            free: frees the context, when nobody is inside.

        Raises:
            RuntimeError: this thread is inside.
        """
        if self._native.inside:
            raise RuntimeError(
                "close: this thread is in a call of this Llama: close it when that has returned"
            )
        with self._closing:
            while self._at_close:
                self._at_close[-1]()
                self._at_close.pop()
            self._native.refuse()
            stop()
            self._native.shut()
            free()


class Locked(Protocol):
    """Protocol of what uses a context: `busy` is its lock, which the `Llama` makes and all of them share."""

    busy: ContextGate


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
        with self.busy.acquire(name):
            return method(self, *given, **named)

    return guarded


def _checked(name: str, kind: Any, value: Any) -> Any:
    """Return an argument, a whole number as an int."""
    if kind is int or (kind == int | None and value is not None):
        return check_int(name, value)
    if inspect.isclass(kind) and kind.__module__.startswith("mixedkv") and not isinstance(value, kind):
        raise TypeError(f"{name}={value!r}: use a {kind.__name__}")
    return value


def present(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Let any thread call a method that touches no rows; the context is not freed meanwhile."""

    @wraps(method)
    def guarded(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self.busy.pin():
            return method(self, *args, **kwargs)

    return guarded
