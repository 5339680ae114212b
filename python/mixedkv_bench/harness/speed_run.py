"""Runs what `speed` times: a prompt and generated tokens, at a depth of a filled cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypedDict

import numpy as np

from mixedkv import _core
from mixedkv_bench.harness.cache_settings import Setting
from mixedkv_bench.harness.contexts import MICRO_BATCH, Context, LoadedModel
from mixedkv_bench.harness.filling import make_fill

_ROOM = 1024  # for any window of the presets; the size of a context does not change its speed


class RunFacts(TypedDict, total=False):
    """Facts of the run in a row, by its field."""

    fill: str
    attention: str
    pages_read: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedWork:
    """Work that is timed: a prompt of `n_prompt` tokens, and `n_gen` tokens one by one, both at `depth`; with
    more `sequences` all are at that depth, and a token of each comes at a time.
    """

    depth: int
    n_prompt: int
    n_gen: int
    threads: int
    fill: str = "auto"
    sequences: int = 1

    @property
    def n_ctx(self) -> int:
        each = self.depth + self.n_gen + 1
        return max(_ROOM, self.sequences * each + max(0, self.n_prompt - self.n_gen))


class Runner(Protocol):
    """One setting at one depth, ready to be timed; of this process or of a peer."""

    facts: RunFacts

    def measure(self) -> tuple[float, float]:
        """Return the seconds for the prompt and for the generated tokens."""


class Local:
    """A setting in this process.

    Raises:
        CannotRunError: the model cannot run it at this depth.
    """

    def __init__(
        self,
        model: LoadedModel,
        setting: Setting,
        work: SpeedWork,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self.context = Context(model, setting, n_ctx=work.n_ctx, threads=work.threads, n_seq=work.sequences)
        try:
            self._fill = make_fill(self.context, work.depth, work.fill)
            attention = self.context.attention()
        except BaseException:
            self.context.close()
            raise
        self.facts: RunFacts = {"fill": self._fill.kind, "attention": attention}
        self._prompt = model.random_tokens(work.n_prompt, seed=2)
        self._tokens = model.random_tokens((work.n_gen + 1) * work.sequences, seed=3)
        self._seqs = np.arange(work.sequences)

    def measure(self) -> tuple[float, float]:
        """Return the seconds that a prompt took, and that generating took, both at the same depth."""
        self._fill.restore()
        start = self._clock()
        for i in range(0, len(self._prompt), MICRO_BATCH):
            self.context.decode(self._prompt[i : i + MICRO_BATCH])
        prompt = self._clock() - start
        self._fill.restore()
        depth = self.context.n_past
        tokens = self._tokens.reshape(-1, len(self._seqs))
        for i, each in enumerate(tokens):
            if i == 1:  # the first step reads the restored rows once, into the CPU's caches
                start = self._clock()
            self.context.decode_rows(each, np.full(len(each), depth + i), self._seqs)
        generated = self._clock() - start
        if self.context.setting.window is not None:
            now = _core.stats(self.context.address)
            if now["n_pages"]:
                self.facts["pages_read"] = now["n_pages_read"] / now["n_pages"]
        return prompt, generated

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()
