"""Compares stored rows with the model, before their first use and while the engine is idle."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from mixedkv.engine.connect.kv_connector import ConnectedEngine
from mixedkv.engine.connect.stored_rows import StoredRows
from mixedkv.errors import ClosedError
from mixedkv.kv.fetched import Fetched, WrongRowsError
from mixedkv.start.sequence import Sequence as CacheSequence
from mixedkv.start.sequences import NO_MATCH
from mixedkv.store import Identity, KVStore

log = logging.getLogger("mixedkv.engine")
_T = TypeVar("_T")

_REST = 50  # times as long as the last comparison took: at most 2% of idle time is spent on them
_LEAST_REST = 5.0  # seconds


@dataclass(frozen=True, slots=True)
class _Held:
    """A sequence of the pool that is given back when a request needs its cells."""

    seq: CacheSequence
    version: int

    @property
    def is_there(self) -> bool:
        return self.seq.version == self.version


class IdleRecheck:
    """Compares stored sequences, chosen at random, while the engine is idle.

    A request that comes meanwhile waits for one call at most, which loads a slice of rows or evaluates up to
    32 tokens. Nothing is evicted for the comparison, and its rows are dropped when a request needs their
    cells.

    Args:
        identities: the identities that the engine has used so far.
    """

    def __init__(
        self,
        engine: ConnectedEngine,
        store: KVStore,
        rows: StoredRows,
        identities: Callable[[], Sequence[Identity]],
    ) -> None:
        self._engine, self._store, self._rows, self._identities = engine, store, rows, identities
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mixedkv-recheck", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        rest = _LEAST_REST
        while not self._closing.wait(rest):
            began, rest = time.perf_counter(), _LEAST_REST
            try:
                if self._engine.idle and (identities := self._identities()):
                    self.look(random.choice(identities))
            except ClosedError:
                return
            except Exception as error:  # a failed comparison fails nothing else
                log.warning("stored rows were not compared: %s: %s", type(error).__name__, error)
            rest = max(rest, _REST * (time.perf_counter() - began))

    def look(self, identity: Identity) -> str | None:
        """Compare a stored sequence; return what is wrong with it, "" if nothing is, None if it was not
        compared.
        """
        engine, recheck = self._engine, self._store.recheck
        match = recheck.random_match(identity)
        if match is None or not (doubt := recheck.sample(match, engine.llm)).spans:
            return None
        fetched = Fetched(self._rows.cut(recheck.read(match)), "", match.exact, doubt)
        held = engine.call(partial(self._place, identity.tenant, match.n_tokens + len(doubt))).result()
        if held is None:
            return None
        problem = ""
        try:
            while fetched.doubt is not None:
                if self._closing.is_set() or not engine.idle:
                    return None
                if not self._call(held, partial(self._advance, fetched, held)):
                    return None
        except WrongRowsError as error:
            problem = str(error)
        finally:
            self._call(held, partial(engine.pool.drop, held.seq))
        engine.observer.rechecked(problem)
        return problem

    def _advance(self, fetched: Fetched, held: _Held) -> bool:
        fetched.advance(self._engine.llm.kv, held.seq.id)
        return True

    def _call(self, held: _Held, function: Callable[[], _T]) -> _T | None:
        """Run a function on the engine's thread; return None if a request has taken the sequence's place."""
        return self._engine.call(lambda: function() if held.is_there else None).result()

    def _place(self, tenant: str, n: int) -> _Held | None:
        """Return a sequence with room for `n` tokens; None if rows would have to be evicted for it."""
        pool = self._engine.pool
        if pool.used + n > self._engine.llm.kv.stats().n_ctx or not pool.has_free:
            return None
        seq = pool.acquire(tenant, NO_MATCH)
        if seq is None:
            return None
        seq.guest = True
        return _Held(seq, seq.version)
