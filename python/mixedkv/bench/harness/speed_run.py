"""What `speed` times: a prompt and generated tokens, at a depth of a filled cache.

The process of `stock_peer` imports this too, without the native part of mixedkv.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypedDict

from mixedkv.bench.harness.cache_settings import Setting
from mixedkv.bench.harness.contexts import MICRO_BATCH, Context, Model
from mixedkv.bench.harness.filling import make_fill

_ROOM = 1024  # for any window of the presets; the size of a context does not change its speed


class RunFacts(TypedDict, total=False):
    """What a row says about the run, by its field."""

    fill: str
    attention: str
    peer_version: str
    peer_extra_buffers: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What is timed: a prompt of `n_prompt` tokens, and `n_gen` tokens one by one, both at `depth`."""

    depth: int
    n_prompt: int
    n_gen: int
    threads: int
    fill: str = "auto"

    @property
    def n_ctx(self) -> int:
        return max(_ROOM, self.depth + max(self.n_prompt, self.n_gen + 1))


class Runner(Protocol):
    """One setting at one depth, ready to be timed; of this process or of a peer's."""

    facts: RunFacts

    def measure(self) -> tuple[float, float]:
        """Seconds for the prompt and for the generated tokens."""

    def close(self) -> None: ...


class Local:
    """A setting in this process.

    Raises:
        CannotRunError: the model cannot run it at this depth.
    """

    def __init__(
        self,
        model: Model,
        setting: Setting,
        work: Work,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self.context = Context(model, setting, n_ctx=work.n_ctx, threads=work.threads)
        try:
            self._fill = make_fill(self.context, work.depth, work.fill)
        except BaseException:
            self.context.close()
            raise
        self.facts: RunFacts = {"fill": self._fill.kind}
        self._prompt = model.random_tokens(work.n_prompt, seed=2)
        self._tokens = model.random_tokens(work.n_gen + 1, seed=3)

    def measure(self) -> tuple[float, float]:
        self._fill.restore()
        start = self._clock()
        for i in range(0, len(self._prompt), MICRO_BATCH):
            self.context.decode(self._prompt[i : i + MICRO_BATCH])
        prompt = self._clock() - start
        self._fill.restore()
        self.context.decode(self._tokens[:1])  # reads the restored rows once, into the CPU's caches
        start = self._clock()
        for i in range(1, len(self._tokens)):
            self.context.decode(self._tokens[i : i + 1])
        return prompt, self._clock() - start

    def close(self) -> None:
        self.context.close()
