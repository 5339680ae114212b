"""Removes the KV of sessions and messages from contexts and stores."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from mixedkv.engine.connect.store_connector import StoreConnector
from mixedkv.engine.engine import Engine
from mixedkv.errors import ClosedError
from mixedkv.store import KVStore
from mixedkv.store.results import MessageInfo


@dataclass(frozen=True)
class ModelKV:
    """The KV of one model: in its store, and in its context."""

    store: KVStore | None
    engine: Engine
    connector: StoreConnector | None

    def forget_session(self, tenant: str, session: str) -> None:
        """Drop a session's rows in the context."""
        if self.engine.alive:
            with suppress(ClosedError):  # it is being closed
                self.engine.call(partial(self.engine.pool.forget, tenant, session)).result()

    def forget_message(self, tenant: str, message_id: str) -> int:
        """Remove a message's KV; return how many entries of the store."""
        if self.store is None:
            return 0
        if self.connector is not None:
            with suppress(ClosedError):
                return self.connector.forget_message(tenant, message_id)
        return self.store.messages.remove(message_id, tenant)


class SessionKV:
    """Removes a session's KV for `ContextCacheManager`: its rows in the contexts of all models, and its KV in
    their stores.
    """

    def __init__(self) -> None:
        self._models: list[ModelKV] = []

    def add(self, model: ModelKV) -> None:
        """Add one more model."""
        self._models.append(model)

    @property
    def _stores(self) -> list[KVStore]:
        return [each.store for each in self._models if each.store is not None]

    def messages(self, tenant: str, message_id: str | None) -> list[MessageInfo]:
        """Return the entries that a tenant's messages, or one of them, end in. Models may share a folder."""
        found = [info for store in self._stores for info in store.messages.entries(tenant, message_id)]
        return list({(info.message_id, info.entry): info for info in found}.values())

    def remove_message(self, tenant: str, message_id: str) -> int:
        """Remove a message's KV; return how many entries."""
        return sum(each.forget_message(tenant, message_id) for each in self._models)

    def remove(self, entry: str | None = None, *, session: str | None = None, tenant: str = "") -> int:
        n = 0
        for each in self._models:
            if session is not None:
                each.forget_session(tenant, session)
            n += each.store.remove(entry, session=session, tenant=tenant) if each.store is not None else 0
        return n

    def remove_orphans(self, living: Iterable[tuple[str, str]], before: float) -> int:
        known = list(living)
        return sum(store.remove_orphans(known, before) for store in self._stores)
