"""Tokens per second of prompts and of generation, at each depth of a filled cache.

All settings take turns, round by round, in one process, so that a machine that slows down or is shared slows
all of them. Ratios are taken within a round and their median is reported. Each measurement starts from the
same restored state, hot rows included: the steady state of a cache that has been running for long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from mixedkv.config import KVSetting
from mixedkv_bench import plot
from mixedkv_bench.bench_test import Bench, BenchTest, Options
from mixedkv_bench.harness.cache_settings import DEFAULT_SPECS, Setting
from mixedkv_bench.harness.contexts import CannotRunError
from mixedkv_bench.harness.progress import Bar
from mixedkv_bench.harness.row import Row, measured
from mixedkv_bench.harness.speed_run import Local, RunFacts, Runner, SpeedWork
from mixedkv_bench.harness.table import NONE, Cells, Table, number, spread


class SpeedRow(Row):
    """One row per setting and depth.

    All settings take turns in one process: every round measures each of them once, every other round in
    reverse order, and the first round is thrown away. A measurement restores the same state of `depth`
    tokens, the rows of the F16 window included, and so shows a cache that has been running for long. Rolling
    back would leave a mixed cache with an empty window. Times are wall time around `llama_decode` and
    `llama_synchronize`.
    """

    test: Literal["speed"] = "speed"
    engine: str = Field(description='`"mixedkv"`, or with `--peer` the name of the program')
    depth: int = Field(description="tokens in the cache before the measured ones")
    n_prompt: int = Field(description="tokens of the prompt, evaluated in micro-batches of 512")
    n_gen: int = Field(description="tokens generated one by one")
    sequences: int = Field(
        default=1, description="that are at this depth in one context and get a token each in a step"
    )
    fill: str | None = measured(
        '`"synthetic"`: the state was made of the rows of 64 decoded tokens, repeated up to the '
        "depth, and as many tokens decoded as the F16 window holds (the few sinks are cold then); "
        '`"peaked"`: as that, with keys such that a tenth of the cache holds the attention; `"real"`: all '
        "were decoded"
    )
    pages_read: float | None = measured("share of the pages that `sparse` read, in all rounds")
    pp_tps: float | None = measured("tokens per second of the prompt, median of the rounds")
    pp_samples: list[float] | None = measured("all rounds, in order")
    pp_vs_f16: float | None = measured(
        "times as fast as the fastest F16 setting of llama.cpp in this run: median of the ratios "
        "within a round"
    )
    pp_vs_uniform: float | None = measured("the same against llama.cpp's own cache of the same K and V types")
    pp_vs_peer: float | None = measured(
        "with `--peer`: times as fast as the fastest F16 setting of the peer, likewise"
    )
    tg_tps: float | None = measured("tokens per second of generation, of all sequences, median of the rounds")
    tg_samples: list[float] | None = measured("as `pp_samples`")
    tg_vs_f16: float | None = measured("as `pp_vs_f16`")
    tg_vs_uniform: float | None = measured("as `pp_vs_uniform`")
    tg_vs_peer: float | None = measured("as `pp_vs_peer`")


class Times(NamedTuple):
    """Seconds of one round."""

    pp: float
    tg: float


Told = Callable[[Setting, float, float], None]  # with tokens per second of the prompt and of generation


def _in_silence(_setting: Setting, _prompt: float, _generated: float) -> None:
    pass


@dataclass
class Contender:
    """A setting, who runs it, and what was measured at one depth."""

    setting: Setting
    engine: str  # "mixedkv", or the name of a peer
    error: str = ""
    facts: RunFacts = field(default_factory=RunFacts)
    runner: Runner | None = None
    times: list[Times] = field(default_factory=list)


def check(options: Options) -> None:
    if options.peer is not None:
        options.peer.check(options.depths, options.n_prompt, options.n_gen)
        if options.sequences > 1:
            raise ValueError(f"--sequences {options.sequences}: a --peer has one: leave one of them out")


def measure(bench: Bench, told: Told = _in_silence, until: float = math.inf) -> None:
    """Add one row per setting and depth.

    What was measured is added also when this is interrupted.

    Args:
        told: called with a setting's rates in its first round, which only warms up.
        until: time of the clock after which no further round begins.
    """
    options, progress = bench.options, bench.progress
    n_contenders = len(options.settings) + len(options.peer_settings)
    progress.add(len(options.depths) * n_contenders * (options.repeats + 1))
    for depth in options.depths:
        work = SpeedWork(
            depth=depth,
            n_prompt=options.n_prompt,
            n_gen=options.n_gen,
            threads=options.threads,
            fill=options.fill,
            sequences=options.sequences,
        )
        with ExitStack() as stack:
            contenders = list(_contenders(bench, work, stack))
            try:
                _take_turns(contenders, work, options.repeats, progress, told, until)
            finally:
                for row in _rows(contenders, work):
                    bench.add(row)


def _contenders(bench: Bench, work: SpeedWork, stack: ExitStack) -> Iterator[Contender]:
    """Yield what is compared: each setting here, and with `--peer` those that llama.cpp knows there."""
    options = bench.options
    for setting in options.settings:
        bench.progress.show(f"speed at {work.depth}: fill {setting.name}")
        contender = Contender(setting, "mixedkv")
        try:
            contender.runner = stack.enter_context(Local(bench.model, setting, work))
            contender.facts = contender.runner.facts
        except CannotRunError as error:
            contender.error = str(error)
        yield contender
    for setting in options.peer_settings:
        assert options.peer is not None
        runner = options.peer.runner(options.file, setting, work)
        yield Contender(setting, options.peer.name, facts=runner.facts, runner=runner)


def _take_turns(
    contenders: Sequence[Contender],
    work: SpeedWork,
    repeats: int,
    progress: Bar,
    told: Told,
    until: float,
) -> None:
    """Run the rounds. The first one only warms up, and every other one goes backwards, so that none always
    follows another.
    """
    for no in range(repeats + 1):
        if no > 1 and time.monotonic() > until:
            progress.say(f"this machine is slower than planned: {no - 1} of {repeats} rounds were measured")
            return
        for contender in contenders[:: -1 if no % 2 else 1]:
            progress.show(f"speed at {work.depth}: {contender.setting.name}")
            if contender.runner is not None and not contender.error:
                try:
                    seconds = contender.runner.measure()
                except CannotRunError as error:
                    contender.error = str(error)
                    continue
                if not no:
                    told(contender.setting, work.n_prompt / seconds[0], work.n_gen / seconds[1])
                else:
                    contender.times.append(Times(*seconds))
            progress.step()


def _rows(contenders: Sequence[Contender], work: SpeedWork) -> Iterator[SpeedRow]:
    for contender in contenders:
        measured: dict[str, float | list[float]] = {}
        if contender.times:
            measured = _rates(contender, contenders, "pp", work.n_prompt) | _rates(
                contender, contenders, "tg", work.n_gen * work.sequences
            )
        row = {
            "engine": contender.engine,
            **contender.setting.head(work.threads),
            "depth": work.depth,
            "n_prompt": work.n_prompt,
            "n_gen": work.n_gen,
            "sequences": work.sequences,
            **contender.facts,
            **measured,
        }
        yield SpeedRow.model_validate(row | ({"error": contender.error} if contender.error else {}))


def _rates(
    contender: Contender, contenders: Sequence[Contender], part: Literal["pp", "tg"], n: int
) -> dict[str, float | list[float]]:
    """Return the fields of one of the two parts."""

    def seconds(of: Contender) -> list[float]:
        return [getattr(times, part) for times in of.times]

    def fastest(matches: Callable[[Contender], bool], ours: bool = True) -> Contender | None:
        candidates = [
            each for each in contenders if (each.engine == "mixedkv") == ours and each.times and matches(each)
        ]
        return min(candidates, key=lambda each: float(np.median(seconds(each))), default=None)

    samples = [n / each for each in seconds(contender)]
    fields: dict[str, float | list[float]] = {
        f"{part}_tps": float(np.median(samples)),
        f"{part}_samples": samples,
    }
    if base := fastest(lambda other: other.setting.is_f16):
        fields[f"{part}_vs_f16"] = _ratio(seconds(base), seconds(contender))
    if base := fastest(lambda other: other.setting.is_f16, ours=False):
        fields[f"{part}_vs_peer"] = _ratio(seconds(base), seconds(contender))
    if base := fastest(lambda other: _is_uniform_twin(other.setting, contender.setting.kv)):
        fields[f"{part}_vs_uniform"] = _ratio(seconds(base), seconds(contender))
    return fields


def _is_uniform_twin(setting: Setting, kv: KVSetting) -> bool:
    """Return whether it is llama.cpp's own cache of the same types."""
    return setting.is_peer and (setting.kv.type_k, setting.kv.type_v) == (kv.type_k, kv.type_v)


def _ratio(base: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the median over rounds of how much less time it took than `base` in the same round."""
    return float(np.median([b / t for b, t in zip(base, seconds, strict=False)]))


def _cells(rows: Sequence[SpeedRow]) -> Cells:
    has_peer = any(row.engine != "mixedkv" for row in rows)
    head = ["cache", "attention"]
    for what in (f"prompt of {rows[0].n_prompt}, tok/s", f"generating {rows[0].n_gen}, tok/s"):
        head += [what, "", "x f16", "x same type", *(["x peer's f16"] if has_peer else [])]
    return [head] + [
        [
            row.name,
            row.attention or NONE,
            number(row.pp_tps, ".1f"),
            spread(row.pp_samples),
            *_ratios(has_peer, row.pp_vs_f16, row.pp_vs_uniform, row.pp_vs_peer),
            number(row.tg_tps, ".1f"),
            spread(row.tg_samples),
            *_ratios(has_peer, row.tg_vs_f16, row.tg_vs_uniform, row.tg_vs_peer),
        ]
        for row in rows
    ]


def _ratios(has_peer: bool, *values: float | None) -> list[str]:
    return [number(value, ".2f") for value in (values if has_peer else values[:-1])]


TABLE = Table(row=SpeedRow, title="Speed at a depth of {} tokens", by=lambda row: row.depth, cells=_cells)
TEST = BenchTest(
    name="speed",
    measures="tokens per second of prompts and answers, at several depths",
    flags=(
        "--flash-attn",
        "--depths",
        "--n-prompt",
        "--n-gen",
        "--repeats",
        "--sequences",
        "--fill",
        "--peer",
        "--peer-kv",
        "--peer-args",
        "--plot",
    ),
    specs=DEFAULT_SPECS,
    tables=(TABLE,),
    check=check,
    measure=measure,
    is_timed=True,
    draw=plot.speed,
)
