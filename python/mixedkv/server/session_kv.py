"""The KV of sessions and messages, wherever it lies."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from mixedkv.engine.connect.store_connector import StoreConnector
from mixedkv.engine.engine import Engine
from mixedkv.store import KVStore, MessageInfo


class SessionKV:
    """Removes a session's KV for `ContextCacheManager`: its rows in the contexts of all models, and its KV in
    their stores.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Engine, KVStore | None]] = []
        self._connectors: list[StoreConnector] = []

    def add(self, engine: Engine, connector: StoreConnector | None) -> None:
        """Add one more model."""
        self._parts.append((engine, connector.store if connector is not None else None))
        if connector is not None:
            self._connectors.append(connector)

    def messages(self, tenant: str, message_id: str | None) -> list[MessageInfo]:
        """Return which entries a tenant's messages end in, or one of them. Models may share a folder."""
        found = [
            info for each in self._connectors for info in each.store.messages.entries(tenant, message_id)
        ]
        return list({(info.message_id, info.entry): info for info in found}.values())

    def remove_message(self, tenant: str, message_id: str) -> int:
        """Remove a message's KV; how many entries."""
        return sum(each.forget_message(tenant, message_id) for each in self._connectors)

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
