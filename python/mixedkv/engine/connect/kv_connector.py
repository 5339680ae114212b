"""Protocol of what an engine's KV goes to and comes from."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from mixedkv.engine.jobs.job import Job
from mixedkv.engine.schedule.observer import Observer
from mixedkv.engine.schedule.sequences import SequencePool
from mixedkv.llama import Llama

_T = TypeVar("_T")


class ConnectedEngine(Protocol):
    """The part of an engine that a connector needs."""

    llm: Llama
    pool: SequencePool
    observer: Observer

    @property
    def idle(self) -> bool: ...

    def ready(self, job: Job) -> None: ...

    def call(self, function: Callable[[], _T]) -> Future[_T]: ...


class KVConnector(Protocol):
    """Protocol of what fetches and offloads KV for an `Engine`; `StoreConnector` does it with a `KVStore`."""

    def attach(self, engine: ConnectedEngine) -> None:
        """Take the engine. It calls this once, before anything else."""

    def fetch(self, job: Job) -> bool:
        """Look for the KV of a new job's prompt, on the submitting thread. False: there is nothing to look
        for. True: `engine.ready(job)` is called later, with `job.offer` set if something was found.
        """
        ...

    def read(self, job: Job, n: int) -> bool:
        """Read the offer of a job, on the engine's thread; the context has rows of the first `n` tokens of
        its prompt. False: no more than that is worth reading. True: `engine.ready(job)` is called again,
        after `job.set_blocks`.
        """
        ...

    def evaluated(self, job: Job, index: int) -> None:
        """Note that the prompt's last token has logits, at `index` of the step's; on the engine's thread."""

    def offload(self, job: Job) -> None:
        """Keep the KV of a job that is done, on the engine's thread. The rows are in `job.seq` as long as the
        `version` of that stays the same: `engine.call` reads them between later steps.
        """

    def stats(self) -> dict[str, Any]:
        """Return numbers to show to people."""
        ...

    def close(self) -> None:
        """Finish what was begun; the engine still runs."""
