"""One thread at a time on the rows of a context: two in llama.cpp would end the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from mixedkv import _core
from mixedkv.errors import ContextBusyError

_P = ParamSpec("_P")
_R = TypeVar("_R")


class BusyGuard:
    """Held while rows are evaluated, moved or read; the thread that holds it may enter again.

    It is the context's own, which every function of the C API looks at. `address` is that of the context.
    """

    def __init__(self, address: Callable[[], int]) -> None:
        self._address = address

    @contextmanager
    def _inside(self, wait: bool) -> Iterator[None]:
        context = self._address()
        _core.enter(context, wait)
        try:
            yield
        finally:
            _core.leave(context)

    def waiting(self) -> AbstractContextManager[None]:
        """Enter as soon as no other thread is there."""
        return self._inside(wait=True)

    @contextmanager
    def at_once(self, what: str) -> Iterator[None]:
        """Enter now.

        Raises:
            ContextBusyError: another thread is there.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(self._inside(wait=False))
            except ContextBusyError as error:
                raise ContextBusyError(f"{what}: {error}; with an engine through Engine.call") from None
            yield


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
