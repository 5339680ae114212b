"""The KV of sessions, wherever it lies."""

from __future__ import annotations

from collections.abc import Iterable

from mixedkv.engine.engine import Engine
from mixedkv.store import KVStore


class SessionKV:
    """What `ContextCacheManager` removes with a session: its rows in the context, and its KV in the store."""

    def __init__(self, engine: Engine, store: KVStore | None) -> None:
        self._engine, self._store = engine, store

    def remove(self, entry: str | None = None, *, session: str | None = None, tenant: str = "") -> int:
        if session is not None and self._engine.alive:
            self._engine.call(lambda: self._engine.pool.forget(tenant, session)).result()
        return self._store.remove(entry, session=session, tenant=tenant) if self._store is not None else 0

    def remove_orphans(self, living: Iterable[tuple[str, str]], before: float) -> int:
        return self._store.remove_orphans(living, before) if self._store is not None else 0
