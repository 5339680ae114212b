"""Protocol between an engine and the place where its KV is kept."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from mixedkv.engine.jobs.job import Job
from mixedkv.engine.schedule.contract import Observer
from mixedkv.engine.schedule.request import Request
from mixedkv.llama import Llama
from mixedkv.prefix.sequences import SequencePool

_T = TypeVar("_T")


class ConnectedEngine(Protocol):
    """The part of an engine that a connector needs."""

    llm: Llama
    pool: SequencePool
    observer: Observer
    threaded: bool

    @property
    def idle(self) -> bool: ...

    def ready(self, job: Job) -> None: ...

    def call(self, function: Callable[[], _T]) -> Future[_T]: ...


class KVConnector(Protocol):
    """Fetches and stores KV for an `Engine`; `StoreConnector` does it with a `KVStore`."""

    def attach(self, engine: ConnectedEngine) -> None:
        """Receive the engine, which calls this once before anything else."""

    def check(self, request: Request) -> None:
        """Refuse a request that asks for rows which this connector does not find; called on any thread.

        Raises:
            ValueError: the message begins with the field.
        """

    def fetch(self, job: Job) -> bool:
        """Look for the KV of a new job's prompt; called on the submitting thread. Return False if there is
        nothing to look for. Otherwise call `engine.ready(job)` later, with `job.prefix.offer` set if KV was
        found.
        """
        ...

    def read(self, job: Job, n: int) -> bool:
        """Read the offer of a job of whose prompt the context has the first `n` tokens; called on the
        engine's thread. Return False if the offer is not worth reading. Otherwise set `job.prefix.fetched`
        and call `engine.ready(job)` later.
        """
        ...

    def evaluated(self, job: Job, index: int) -> None:
        """Note that the prompt's last token has logits, at `index` in the step; called on the engine's
        thread.
        """

    def offload(self, job: Job) -> None:
        """Store the KV of a job that is done; called on the engine's thread. The rows stay in `job.seq` until
        its `version` changes, so they can be read by `engine.call` between later steps.
        """

    def stats(self) -> dict[str, Any] | None:
        """Return counts and sizes for people to read."""
        ...

    def close(self) -> None:
        """Finish what was begun. The engine still runs."""


class NoConnector:
    """A `KVConnector` that keeps nothing: prompts start from the context's own rows."""

    def attach(self, engine: ConnectedEngine) -> None:
        """Do nothing."""

    def check(self, request: Request) -> None:
        refuse_chunks(request)

    def fetch(self, job: Job) -> bool:
        return False

    def read(self, job: Job, n: int) -> bool:
        return False

    def evaluated(self, job: Job, index: int) -> None:
        """Do nothing."""

    def offload(self, job: Job) -> None:
        """Do nothing."""

    def stats(self) -> None:
        return None

    def close(self) -> None:
        """Do nothing."""


def refuse_chunks(request: Request) -> None:
    """Refuse a request for what only a `ChunkConnector` finds.

    Raises:
        ValueError: the request asks for chunks.
    """
    if request.reuse_options is not None:
        raise ValueError("chunks: give the engine a ChunkConnector(store), which finds them")
    if request.reuse == "chunks":
        raise ValueError("reuse='chunks': give the engine a ChunkConnector(store), which finds them")
