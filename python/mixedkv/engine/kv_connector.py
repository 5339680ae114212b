"""KV between the engine and the store: what a finished job leaves is stored, what a new one needs is fetched.

Rows leave and enter the context on the engine's thread, a bounded part per step; hashing, encrypting and
files are the business of two threads here.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from mixedkv.config import MixedKVConfig
from mixedkv.engine.engine import ClosedError, Engine
from mixedkv.engine.job import Job
from mixedkv.engine.sequences import Sequence
from mixedkv.kv.block import KVBlock
from mixedkv.store import Identity, KVStore, Match
from mixedkv.tokens import Tokens

log = logging.getLogger("mixedkv.engine")

_SLICE_BYTES = 16 << 20  # copied out or in between two steps: some milliseconds
_LEAST = 32  # tokens worth storing, and worth fetching more than the context has


class Keeper:
    """Stores and fetches for one engine; sets its `keep` and `fetch`.

    Args:
        store: closed by `close`.
    """

    def __init__(self, engine: Engine, store: KVStore) -> None:
        self._engine, self._store = engine, store
        self._identities: dict[str, Identity] = {}
        self._identity_lock = threading.Lock()
        stats = engine.llm.kv.stats()
        self._slice = max(256, _SLICE_BYTES * stats.n_ctx // max(1, stats.bytes_total))
        setting = engine.llm.kv.config
        self._window = setting.quantization_threshold if isinstance(setting, MixedKVConfig) else 0
        self._out: queue.SimpleQueue[_Left | None] = queue.SimpleQueue()
        self._in: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._n_unstored = 0
        self._identity("")  # what the model file says fails now, not later
        self._threads = [
            threading.Thread(target=self._work, args=args, name=name, daemon=True)
            for name, args in (
                ("mixedkv-store", (self._out, self._put, self._stored)),
                ("mixedkv-fetch", (self._in, self._fetch, engine.ready)),
            )
        ]
        for thread in self._threads:
            thread.start()
        engine.keep, engine.fetch = self.keep, self.fetch

    # --- the engine's hooks ---

    def keep(self, job: Job) -> None:
        """On the engine's thread: a job is done and its sequence idle."""
        seq = job.seq
        if seq is not None and seq.exact and len(seq.tokens) >= _LEAST:
            tokens = np.array(seq.tokens, np.int32)
            self._n_unstored += 1
            self._out.put(_Left(seq, seq.version, tokens, job.tenant, job.session))

    def fetch(self, job: Job) -> bool:
        """On the submitting thread: look into the store before the job starts."""
        if job.n_prompt <= _LEAST:
            return False
        self._in.put(job)
        return True

    # --- outside ---

    def stats(self) -> dict[str, Any]:
        return {**asdict(self._store.stats()), "waiting_to_be_stored": self._n_unstored}

    def close(self) -> None:
        """Store what waits, then close the store. The engine must still run."""
        self._engine.keep = self._engine.fetch = None
        self._out.put(None)
        self._in.put(None)
        for thread in self._threads:
            thread.join()
        self._store.close()

    # --- the threads ---

    def _work(self, items: Any, work: Callable[[Any], None], after: Callable[[Any], None]) -> None:
        while (item := items.get()) is not None:
            try:
                work(item)
            except ClosedError:
                pass
            except Exception as error:  # storing is a service, never a reason to fail a request
                log.warning("the store: %s: %s", type(error).__name__, error)
                self._engine.observe.store_failed(type(error).__name__)
            finally:
                after(item)

    def _stored(self, _: _Left) -> None:
        """Counted on two threads, so on the one that counts up."""
        with contextlib.suppress(ClosedError):
            self._engine.call(self._count_down)

    def _count_down(self) -> None:
        self._n_unstored -= 1

    def _identity(self, tenant: str) -> Identity:
        with self._identity_lock:
            if tenant not in self._identities:
                self._identities[tenant] = Identity.of(self._engine.llm, tenant=tenant)
            return self._identities[tenant]

    def _fetch(self, job: Job) -> None:
        if job.cancelled:
            return
        tokens = job.prompt[: job.n_prompt - 1]
        exact_only = self._engine.pool.exact_only
        match = self._store.find(self._identity(job.tenant), tokens, exact_only=exact_only)
        if match is None:
            return
        have = self._engine.call(lambda: self._engine.pool.match(job.tenant, job.prompt).n).result()
        if match.n_tokens < have + _LEAST:
            return
        found = self._store.read_from(match)
        if found is None:
            self._engine.observe.restore_failed("read")
            return
        blocks, tier = found
        job.set_blocks(self._cut(blocks), tier, match.exact)

    def _cut(self, blocks: list[KVBlock]) -> list[KVBlock]:
        """Blocks of a size that can be loaded between two steps."""
        return [
            block.slice(p0, min(p0 + self._slice, block.p1))
            for block in blocks
            for p0 in range(block.p0, block.p1, self._slice)
        ]

    def _put(self, left: _Left) -> None:
        """Store what is not stored yet of a sequence, in slices; each is found by the next."""
        identity = self._identity(left.tenant)
        n = len(left.tokens)
        parent = self._parent(identity, left.tokens)
        while (p0 := parent.n_tokens if parent is not None else 0) < n:
            p1 = min(n, p0 + self._slice)
            p1 = n if n - p1 < self._window else p1  # the last one has the whole F16 window
            block = self._export(left, p0, p1)
            if block is None:
                return
            self._store.put(identity, block, parent, session=left.session)
            self._engine.observe.stored(p1 - p0)
            if p1 == n:
                return
            parent = self._store.find(identity, left.tokens, max_tokens=p1)
            if parent is None or parent.n_tokens != p1:
                return  # removed meanwhile, or the budget is too small

    def _parent(self, identity: Identity, tokens: Tokens) -> Match | None:
        """What the new entry builds on. Within another entry it leaves room for the F16 window, whose rows
        that entry does not have in F16.
        """
        match = self._store.find(identity, tokens)
        if match is None or match.n_tokens == len(tokens) or match.exact:
            return match
        return self._store.find(identity, tokens, max_tokens=max(0, len(tokens) - self._window))

    def _export(self, left: _Left, p0: int, p1: int) -> KVBlock | None:
        """None when the sequence has gone or was cut meanwhile."""

        def export() -> KVBlock | None:
            if left.seq.version != left.version:
                return None
            return self._engine.llm.kv.export(left.seq.id, p0, p1, left.tokens[p0:p1])

        return self._engine.call(export).result()


class _Left:
    """Rows that a job left in the context."""

    def __init__(self, seq: Sequence, version: int, tokens: Tokens, tenant: str, session: str | None) -> None:
        self.seq, self.version, self.tokens = seq, version, tokens
        self.tenant, self.session = tenant, session


class SessionRows:
    """What `ContextCacheManager` removes with a session: its rows in the context, and its KV in the store."""

    def __init__(self, engine: Engine, store: KVStore | None) -> None:
        self._engine, self._store = engine, store

    def remove(self, entry: str | None = None, *, session: str | None = None, tenant: str = "") -> int:
        if session is not None and self._engine.alive:
            self._engine.call(lambda: self._engine.pool.forget(tenant, session)).result()
        return self._store.remove(entry, session=session, tenant=tenant) if self._store is not None else 0
