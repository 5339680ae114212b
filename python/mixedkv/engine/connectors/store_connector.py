"""Moves KV between an engine and a `KVStore`: stores the rows of finished jobs, and fetches those of new
ones.

Rows leave and enter the context on the engine's thread, a bounded part per step. Two threads here hash,
encrypt, and read and write files. For an engine without a thread all is done on the caller's: a prompt is
stored when the first token of its answer is out, so that saving does not delay it, and the rest at the end.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from mixedkv.engine.connectors.kv_connector import ConnectedEngine, refuse_chunks
from mixedkv.engine.jobs.job import Job
from mixedkv.engine.schedule.request import Request
from mixedkv.errors import ClosedError
from mixedkv.kv.block import KVBlock
from mixedkv.kv.fetched import Fetched
from mixedkv.limits import CELLS
from mixedkv.prefix.sequences import Sequence
from mixedkv.store import Identity, KVStore
from mixedkv.store.entry_row import EntryError
from mixedkv.store.results import Match, Saved
from mixedkv.store.tiers.disk import is_full
from mixedkv.tokens import Tokens

_SLICE_BYTES = 16 << 20  # copied between two steps at a time, which takes some milliseconds


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Rows of a sequence, which are there until its `version` changes."""

    seq: Sequence
    version: int
    tokens: Tokens


class StoredRows:
    """Reads and stores rows, on any thread but the engine's."""

    def __init__(self, engine: ConnectedEngine) -> None:
        self._engine = engine
        stats = engine.llm.kv.stats()
        self._slice = max(CELLS, _SLICE_BYTES * stats.n_ctx // max(1, stats.bytes_total))
        if not engine.pool.rule.only_approximate:  # a slice can only be found where there is a checkpoint
            self._slice = stats.n_ctx

    def put(
        self, store: KVStore, identity: Identity, rows: SequenceRows, session: str | None = None
    ) -> Saved:
        """Store what is not stored yet; `n_tokens` of the result are in the store now."""
        saved = store.keep(
            identity, rows.tokens, partial(self._export, rows), session=session, most=self._slice
        )
        if saved.n_stored:
            self._engine.observer.stored(saved.n_stored)
        return saved

    def cut(self, blocks: list[KVBlock]) -> list[KVBlock]:
        """Cut blocks to a size that can be loaded between two steps."""
        return [
            block.slice(p0, min(p0 + self._slice, block.p1))
            for block in blocks
            for p0 in range(block.p0, block.p1, self._slice)
        ]

    def _export(self, rows: SequenceRows, p0: int, p1: int) -> KVBlock | None:
        """Export the rows; return None if the sequence has gone or was cut meanwhile, or some of them are not
        those of an evaluation from the start.
        """

        def export() -> KVBlock | None:
            if rows.seq.version != rows.version:
                return None
            kv, seq, n = self._engine.llm.kv, rows.seq, len(rows.tokens)
            block = kv.export(seq.id, p0, p1, rows.tokens[p0:p1])
            if block.n_exact < len(block):
                return None
            whole = kv.holds(seq.id, n)  # its end needs no checkpoint
            points = {point.n: point for point in seq.checkpoints if point.n < n or not whole}
            points |= {point.n: point for point in block.checkpoints}
            return replace(block, checkpoints=tuple(points[n] for n in sorted(points) if p0 < n <= p1))

        return self._engine.call(export).result()


log = logging.getLogger("mixedkv.engine")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Finished:
    """Rows in the context of a job, to be stored."""

    job: Job
    rows: SequenceRows
    tenant: str
    session: str | None
    message_ends: list[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Offer:
    """A finding in the store for a job's prompt: a prefix, passages, or both."""

    match: Match | None

    def has_more(self, n: int, least: int) -> bool:
        """Return whether the prefix is at least `least` tokens longer than `n`."""
        return self.match is not None and self.match.n_tokens >= n + least


@dataclass(frozen=True, slots=True)
class FetchTask:
    """A job whose KV is looked for; or, if it has an `offer`, read from position `n` on."""

    job: Job
    offer: Offer | None = None
    n: int = 0


class StoreConnector:
    """Stores and fetches for one engine: a `KVConnector`.

    Args:
        store: closed with the connector, unless `closes` is False.
    """

    _engine: ConnectedEngine

    def __init__(self, store: KVStore, *, closes: bool = True) -> None:
        self.store, self._closes = store, closes
        self._identities: dict[str, Identity] = {}
        self._identity_lock = threading.Lock()
        self._finished: queue.SimpleQueue[_Finished | None] = queue.SimpleQueue()
        self._fetches: queue.SimpleQueue[FetchTask | None] = queue.SimpleQueue()
        self._closed, self._asking = False, threading.Lock()
        self._n_unstored = 0
        self._threads: list[threading.Thread] = []

    def attach(self, engine: ConnectedEngine) -> None:
        """Begin the threads that fetch and offload KV; the engine calls it once."""
        self._engine = engine
        self._rows = StoredRows(engine)
        self._identity("")  # fail now if the model's file cannot be read
        if not engine.threaded:
            return
        self._begin("mixedkv-offload", self._finished, self._put, self._stored)
        self._begin("mixedkv-fetch", self._fetches, self._fetch, lambda task: engine.ready(task.job))

    def _begin(
        self,
        name: str,
        items: queue.SimpleQueue[_T | None],
        work: Callable[[_T], None],
        after: Callable[[_T], None],
    ) -> None:
        thread = threading.Thread(target=self._work, args=(items, work, after), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    # --- the engine's hooks ---

    def check(self, request: Request) -> None:
        """Refuse a request for chunks, which this connector does not find.

        Raises:
            ValueError: the message begins with the field.
        """
        refuse_chunks(request)

    def evaluated(self, job: Job, index: int) -> None:
        """Without a thread, store the prompt before the next step; others are stored when the job is done."""
        if not self._engine.threaded and job.request.store and job.request.sampling is not None:
            self._offload(job, ended=False)

    def flush(self) -> None:
        """Wait until the rows of all finished jobs are stored."""
        while self._n_unstored and self._threads and all(thread.is_alive() for thread in self._threads):
            time.sleep(0.01)

    def offload(self, job: Job) -> None:
        """Hand a finished job's rows to the thread that stores them; without one, store them at once."""
        self._offload(job, ended=True)

    def _offload(self, job: Job, ended: bool) -> None:
        seq = job.seq
        if seq is None or not job.is_stored:
            return
        if len(seq.tokens) >= job.prefix.least and self._engine.pool.is_exact(seq):
            tokens = np.array(seq.tokens, np.int32)
            self._n_unstored += 1
            rows = SequenceRows(seq, seq.version, tokens)
            ends = _message_ends(job, len(tokens), ended)
            finished = _Finished(job, rows, job.tenant, job.request.session, ends)
            if self._engine.threaded:
                self._finished.put(finished)
            else:
                self._engine.call(partial(self._do, finished, self._put, self._stored))

    def fetch(self, job: Job) -> bool:
        """Have the KV of a job's prompt looked for; return False if the prompt is too short."""
        if job.n_prompt <= job.prefix.least:
            return False
        if self._engine.threaded:
            self._fetches.put(FetchTask(job))
        else:
            self._do(FetchTask(job), self._fetch)
        return self._engine.threaded

    def read(self, job: Job, n: int) -> bool:
        """Have the KV that was found for a job read, if that is worth it when the context has `n` tokens
        already.
        """
        offer, job.prefix.offer = job.prefix.offer, None
        assert isinstance(offer, Offer)
        if not self._saves_enough(job, offer, n):
            return False
        if not self._engine.threaded:
            self._do(FetchTask(job, offer, n), self._fetch)
            return False
        with self._asking:  # nothing is fetched any more once closing has begun
            if not self._closed:
                self._fetches.put(FetchTask(job, offer, n))
            return not self._closed

    def _saves_enough(self, job: Job, offer: Offer, n: int) -> bool:
        return offer.has_more(n, job.prefix.least)

    # --- outside ---

    def forget_message(self, tenant: str, message_id: str) -> int:
        """Remove a message's KV from the store and from idle sequences, with all that builds on it; return
        how many entries. A prompt that is being answered may be stored again.
        """
        for p0, match in self.store.messages.sequences(self._identity(tenant), message_id):
            drop = partial(self._engine.pool.forget_tokens, tenant, match.tokens, p0)
            self._engine.call(drop).result()
        return self.store.messages.remove(message_id, tenant)

    def stats(self) -> dict[str, Any]:
        """Return the store's stats, and how many jobs wait to be stored."""
        return {**asdict(self.store.stats()), "waiting_to_be_stored": self._n_unstored}

    def close(self) -> None:
        """Store the waiting jobs, then close the store unless others use it."""
        self._finished.put(None)
        with self._asking:
            self._closed = True
            self._fetches.put(None)
        for thread in self._threads:
            thread.join()
        if self._closes:
            self.store.close()

    # --- the threads ---

    def _work(
        self, items: queue.SimpleQueue[_T | None], work: Callable[[_T], None], after: Callable[[_T], None]
    ) -> None:
        while (item := items.get()) is not None:
            self._do(item, work, after)

    def _do(self, item: _T, work: Callable[[_T], None], after: Callable[[_T], None] = lambda _: None) -> None:
        try:
            work(item)
        except ClosedError:
            pass
        except Exception as error:  # a failure to store never fails a request
            if not is_full(error):  # the store has logged it already
                log.warning("the store: %s: %s", type(error).__name__, error)
            if isinstance(item, _Finished | FetchTask):
                item.job.store_problem = str(error)
            self._engine.observer.store_failed(type(error).__name__)
        finally:
            after(item)

    def _stored(self, _: _Finished) -> None:
        """Count down on the engine's thread, which also counts up."""
        with contextlib.suppress(ClosedError):
            self._engine.call(self._count_down)

    def _count_down(self) -> None:
        self._n_unstored -= 1

    def _identity(self, tenant: str) -> Identity:
        setting = self._engine.llm.kv.row_setting  # a window or an adapter may change
        with self._identity_lock:
            known = self._identities.get(tenant)
            if known is None or known.setting != setting:
                known = self._identities[tenant] = Identity.of(self._engine.llm, tenant=tenant)
            return known

    def _fetch(self, task: FetchTask) -> None:
        if task.job.cancelled:
            return
        if task.offer is None:
            task.job.prefix.offer = self._find(task.job)
        else:
            self._read(task.job, task.offer, task.n)

    def _find(self, job: Job) -> Offer | None:
        tokens = job.prompt[: job.n_prompt - 1]
        exact_only = self._engine.pool.is_exact_only(job.prefix.accept)
        identity = self._identity(job.tenant)
        match = self.store.find(identity, tokens, exact_only=exact_only)
        if match is not None and (n := job.outside_parts(match.n_tokens)) < match.n_tokens:
            match = self.store.find(identity, tokens[:n], exact_only=exact_only)
        return Offer(match) if match is not None else None

    def _read(self, job: Job, offer: Offer, n: int) -> None:
        """Read a prefix, if it is long enough."""
        match = offer.match
        if match is None or not offer.has_more(n, job.prefix.least):
            return
        try:
            blocks, tier = self.store.read_stored(match)
        except EntryError as error:
            job.store_problem = str(error)
            self._engine.observer.restore_failed("read")
            return
        unverified = self.store.recheck.unverified(match, self._engine.llm)
        job.prefix.fetched = Fetched(self._rows.cut(blocks), tier, match.exact, unverified)

    def _put(self, finished: _Finished) -> None:
        identity = self._identity(finished.tenant)
        saved = self._rows.put(self.store, identity, finished.rows, finished.session)
        finished.job.n_stored += saved.n_stored
        finished.job.store_problem = saved.reason or finished.job.store_problem
        if finished.message_ends:
            tokens = finished.rows.tokens[: saved.n_tokens]
            match = self.store.find(identity, tokens, remote=False)
            if match is not None:
                self.store.messages.note(match, finished.message_ends)


def _message_ends(job: Job, n: int, ended: bool) -> list[tuple[str, int]]:
    """Return the ids of messages in a job's `n` tokens, and where each ends; those of the prompt only while
    all of it is there.
    """
    given = [] if job.n_dropped else [each for each in job.request.message_ends if each[1] <= n]
    return [*given, (job.message_id, n)] if job.message_id and ended else given
