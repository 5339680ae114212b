"""Rows that the prompt of a request may start from."""

from __future__ import annotations

from typing import Any, Protocol

from mixedkv.engine.schedule.request import Request
from mixedkv.prefix.sequences import Reuse

_LEAST = 32  # tokens


class StoredPrefix(Protocol):
    """Rows of the first tokens of a prompt that come from a store."""

    n: int
    tier: str
    exact: bool

    @property
    def is_loaded(self) -> bool: ...


class PrefixSource:
    """The choice of rows that a prompt may start from, and what was found of them.

    Attributes:
        reuse, accept: whether existing rows may be reused, and which; None is the engine's default.
        least: minimum number of tokens that is worth storing or fetching; 1 for a session, which must be
            kept.
        first: position of the first token that can be evaluated: rows before it must exist.
        most_cut: how many of the last rows of a paused sequence may be taken away.
        matched: the best start in the context, and the state of the context when it was looked for.
        offer: KV of the prompt that was found in a store and is not read yet.
        fetched: stored rows of the prompt that are loaded, or will be, where the context has fewer.
    """

    def __init__(self, request: Request) -> None:
        self.reuse = bool(request.reuse) and request.prompt_logprobs is None
        self.accept: Reuse | None = request.reuse if isinstance(request.reuse, str) else None
        self.least = _LEAST if request.session is None else 1
        self.first = self.most_cut = 0
        self.matched: tuple[object, Any] | None = None
        self.offer: object | None = None
        self.fetched: StoredPrefix | None = None

    @property
    def n_fetched(self) -> int:
        """Number of the prompt's tokens that have stored rows."""
        return self.fetched.n if self.fetched is not None else 0

    @property
    def is_loading(self) -> bool:
        """True while stored rows are still to be loaded."""
        return self.fetched is not None and not self.fetched.is_loaded
