"""Tokens per second of prompts and of generation, at each depth of a filled cache.

All settings take turns, round by round, in one process, so that a machine that slows down or is shared slows
all of them. Ratios are taken within a round and their median is reported. Each measurement starts from the
same restored state, hot rows included: the steady state of a cache that has been running for long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from mixedkv.bench.harness.cache_settings import Setting
from mixedkv.bench.harness.contexts import MICRO_BATCH, CannotRunError, Context, Model
from mixedkv.bench.harness.filling import make_fill
from mixedkv.bench.harness.progress import Progress
from mixedkv.bench.harness.summary import quartiles

_ROOM = 1024  # for any window of the presets; the size of a context does not change its speed

Row = dict[str, Any]


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

    facts: Row

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
        self.facts: Row = {"fill": self._fill.kind}
        self._prompt = model.random_tokens(work.n_prompt, seed=2)
        self._tokens = model.random_tokens(work.n_gen + 1, seed=3)

    def measure(self) -> tuple[float, float]:
        self._fill.restore()
        start = self._clock()
        for i in range(0, len(self._prompt), MICRO_BATCH):
            self.context.decode(self._prompt[i : i + MICRO_BATCH])
        prompt = self._clock() - start
        self._fill.restore()
        self.context.decode(
            self._tokens[:1]
        )  # the restored rows are in the caches of the CPU: read them once
        start = self._clock()
        for i in range(1, len(self._tokens)):
            self.context.decode(self._tokens[i : i + 1])
        return prompt, self._clock() - start

    def close(self) -> None:
        self.context.close()


@dataclass
class Lane:
    """A line of the table: a setting, who runs it, and what was measured."""

    setting: Setting
    engine: str  # "mixedkv", or "llama_cpp" for a peer
    error: str = ""
    facts: Row = field(default_factory=dict)
    runner: Runner | None = None
    times: list[tuple[float, float]] = field(default_factory=list)


class Opener(Protocol):
    """Makes the runner of a lane."""

    def __call__(self, setting: Setting, work: Work) -> Runner: ...


Entry = tuple[Setting, str, Opener]  # a setting, the name of its engine, and who makes its runner


def measure(
    lanes: Sequence[Entry],
    works: Sequence[Work],
    repeats: int,
    progress: Progress,
    add: Callable[[Row], None],
) -> None:
    """Add one row per lane and depth.

    What was measured is added also when this is interrupted.
    """
    progress.add(len(works) * len(lanes) * (repeats + 1))
    for work in works:
        running = [Lane(setting, engine) for setting, engine, _ in lanes]
        try:
            with ExitStack() as stack:
                for lane, (_, _, open_) in zip(running, lanes, strict=True):
                    _open(lane, open_, work, stack, progress)
                _take_turns(running, work, repeats, progress)
        finally:
            for row in _rows(running, work):
                add(row)


def _open(lane: Lane, open_: Opener, work: Work, stack: ExitStack, progress: Progress) -> None:
    progress.show(f"speed at {work.depth}: fill {lane.setting.name}")
    try:
        lane.runner = open_(lane.setting, work)
        stack.callback(lane.runner.close)
        lane.facts = lane.runner.facts
    except CannotRunError as error:
        lane.error = str(error)


def _take_turns(lanes: Sequence[Lane], work: Work, repeats: int, progress: Progress) -> None:
    """The first round only warms up. Every other one goes backwards: no lane always follows another."""
    for no in range(repeats + 1):
        for lane in lanes[:: -1 if no % 2 else 1]:
            progress.show(f"speed at {work.depth}: {lane.setting.name}")
            if lane.runner is not None and not lane.error:
                try:
                    seconds = lane.runner.measure()
                except CannotRunError as error:
                    lane.error = str(error)
                    continue
                if no:
                    lane.times.append(seconds)
            progress.step()


def _rows(lanes: Sequence[Lane], work: Work) -> Iterator[Row]:
    ours = [lane for lane in lanes if lane.engine == "mixedkv"]
    for lane in lanes:
        row: Row = {
            "test": "speed",
            "engine": lane.engine,
            "kv": lane.setting.spec,
            "flash_attn": lane.setting.flash_attn,
            "depth": work.depth,
            "n_prompt": work.n_prompt,
            "n_gen": work.n_gen,
            "threads": work.threads,
            **lane.facts,
        }
        if lane.error:
            row["error"] = lane.error
        for i, (key, n) in enumerate((("pp", work.n_prompt), ("tg", work.n_gen))):
            if not lane.times:
                continue
            samples = [n / times[i] for times in lane.times]
            low, median, high = quartiles(samples)
            row |= {f"{key}_tps": median, f"{key}_low": low, f"{key}_high": high, f"{key}_samples": samples}
            if base := _fastest(ours, i, lambda lane: lane.setting.is_f16):
                row[f"{key}_vs_f16"] = _ratio(base, lane, i)
            if base := _fastest(ours, i, lambda other, kv=lane.setting.kv: _is_uniform_twin(other, kv)):
                row[f"{key}_vs_uniform"] = _ratio(base, lane, i)
        yield row


def _is_uniform_twin(lane: Lane, kv: Any) -> bool:
    """Whether it is llama.cpp's own cache of the same types."""
    other = lane.setting.kv
    return lane.setting.is_peer and (other.type_k, other.type_v) == (kv.type_k, kv.type_v)


def _fastest(lanes: Sequence[Lane], i: int, wanted: Any) -> Lane | None:
    candidates = [lane for lane in lanes if lane.times and wanted(lane)]
    return min(candidates, key=lambda lane: float(np.median([t[i] for t in lane.times])), default=None)


def _ratio(base: Lane, lane: Lane, i: int) -> float:
    """Median over rounds of how much faster `lane` was than `base` in the same round."""
    return float(np.median([b[i] / t[i] for b, t in zip(base.times, lane.times, strict=False)]))
