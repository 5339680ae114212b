"""The KV of sessions, wherever it lies."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from mixedkv.engine.engine import Engine
from mixedkv.store import KVStore


class SessionKV:
    """What `ContextCacheManager` removes with a session: its rows in the contexts of all models, and its KV
    in their stores.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Engine, KVStore | None]] = []

    def add(self, engine: Engine, store: KVStore | None) -> None:
        """Of one model more."""
        self._parts.append((engine, store))

    def remove(self, entry: str | None = None, *, session: str | None = None, tenant: str = "") -> int:
        n = 0
        for engine, store in self._parts:
            if session is not None and engine.alive:
                engine.call(partial(engine.pool.forget, tenant, session)).result()
            n += store.remove(entry, session=session, tenant=tenant) if store is not None else 0
        return n

    def remove_orphans(self, living: Iterable[tuple[str, str]], before: float) -> int:
        known = list(living)
        return sum(store.remove_orphans(known, before) for _, store in self._parts if store is not None)
