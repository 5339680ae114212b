"""Times a step of many sequences in a cache in which they have come and gone for long, and in a fresh one.

Rows of a sequence lie together in a fresh cache. Where they mix with those of others as time goes by,
attention reads more of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import numpy as np
from pydantic import Field

from mixedkv_bench.bench_test import Bench, BenchTest, Measure
from mixedkv_bench.harness import context_facts
from mixedkv_bench.harness.cache_settings import Setting
from mixedkv_bench.harness.contexts import MICRO_BATCH, CannotRunError, Context
from mixedkv_bench.harness.row import Row
from mixedkv_bench.harness.summary import quartiles
from mixedkv_bench.harness.table import NONE, Cells, Table, number, spread

_AGEING = 1000  # steps
_PER_SEQUENCE = 1024  # tokens of the context
_PROMPT, _LEAVES = (64, 400), 1 / 60  # tokens of who joins, and how often a sequence leaves


class AgedRow(Row):
    """One row per setting.

    Sequences decode together, a token each in a step, in one unified cache. In the aged one they have done so
    for 1,000 steps, and every sixtieth token of a sequence was its last. Another one with a prompt of 64 to
    400 tokens took its place. The fresh one has been given sequences of the same lengths, one after the
    other. Both then take turns, `n_gen` steps at a time, and ratios are taken within a turn.
    """

    test: Literal["aged"] = "aged"
    n_seq: int = Field(description="sequences that decode together")
    n_ctx: int = Field(description="tokens of the cache, which they share")
    n_gen: int = Field(description="steps of a turn")
    steps: int | None = Field(default=None, description="steps of the aged cache before it was measured")
    fresh_ms: float | None = Field(
        default=None, description="milliseconds of a step in the fresh cache, median"
    )
    aged_ms: float | None = Field(
        default=None, description="milliseconds of a step in the aged cache, median"
    )
    ratio: float | None = Field(default=None, description="aged to fresh, median of the turns")
    ratio_low: float | None = Field(default=None, description="lower quartile of the turns")
    ratio_high: float | None = Field(default=None, description="upper quartile of the turns")
    ratio_samples: list[float] | None = Field(default=None, description="all turns, in order")


class Crowd:
    """Sequences of a context that decode together."""

    def __init__(self, context: Context, n_seq: int) -> None:
        self._context, self._random = context, np.random.default_rng(1)
        self.lengths = [0] * n_seq

    def join(self, seq: int, n: int) -> None:
        """Start a sequence of `n` tokens in place of the one that was there."""
        self._context.remove(seq)
        tokens = self._context.model.random_tokens(n, seed=n)
        for i in range(0, n, MICRO_BATCH):
            part = tokens[i : i + MICRO_BATCH]
            self._context.decode_rows(part, np.arange(i, i + len(part)), np.full(len(part), seq))
        self.lengths[seq] = n

    def step(self) -> None:
        """Evaluate one more token of each sequence."""
        tokens = self._context.model.random_tokens(len(self.lengths))
        self._context.decode_rows(tokens, np.array(self.lengths), np.arange(len(self.lengths)))
        self.lengths = [n + 1 for n in self.lengths]

    def grow_old(self, steps: int, room: int) -> Iterator[None]:
        """Steps in which sequences leave and others join; of `room` tokens at most."""
        for _ in range(steps):
            for seq, n in enumerate(self.lengths):
                if n == 0 or n >= room or self._random.random() < _LEAVES:
                    self.join(seq, int(self._random.integers(*_PROMPT)))
            self.step()
            yield

    def seconds(self, steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        return time.perf_counter() - began


def prepare(bench: Bench) -> Measure:
    return lambda: measure(bench)


def measure(bench: Bench) -> None:
    """Add one row per setting."""
    options = bench.options
    n_seq = max(options.clients)
    bench.progress.add(len(options.settings) * (_AGEING + options.repeats))
    for setting in options.settings:
        row: dict[str, Any] = {
            "kv": setting.spec,
            "flash_attn": setting.flash_attn,
            "threads": options.threads,
            "n_seq": n_seq,
            "n_ctx": n_seq * _PER_SEQUENCE,
            "n_gen": options.n_gen,
        }
        try:
            row |= _measure(bench, setting, n_seq)
        except CannotRunError as error:
            row["error"] = str(error)
        bench.add(AgedRow.model_validate(row))


def _measure(bench: Bench, setting: Setting, n_seq: int) -> dict[str, Any]:
    options, progress = bench.options, bench.progress
    n_ctx, n_gen = n_seq * _PER_SEQUENCE, options.n_gen
    with ExitStack() as stack:

        def open_() -> Context:
            context = Context(bench.model, setting, n_ctx=n_ctx, threads=options.threads, n_seq=n_seq)
            stack.callback(context.close)
            return context

        progress.show(f"aged: {setting.name}")
        aged, fresh = Crowd(first := open_(), n_seq), Crowd(open_(), n_seq)
        room = _PER_SEQUENCE - n_gen * (options.repeats + 1)
        for _ in aged.grow_old(_AGEING, room):
            progress.step()
        for seq, n in enumerate(aged.lengths):
            fresh.join(seq, n)
        turns = []
        for no in range(options.repeats + 1):  # the first one only warms up
            order = (aged, fresh) if no % 2 else (fresh, aged)
            seconds = {crowd: crowd.seconds(n_gen) for crowd in order}
            if no:
                turns.append((seconds[aged], seconds[fresh]))
                progress.step()
        samples = [a / f for a, f in turns]
        low, middle, high = quartiles(samples)
        return {
            "attention": context_facts.attention(first),
            "steps": _AGEING,
            "aged_ms": float(np.median([a for a, _ in turns])) / n_gen * 1000,
            "fresh_ms": float(np.median([f for _, f in turns])) / n_gen * 1000,
            "ratio": middle,
            "ratio_low": low,
            "ratio_high": high,
            "ratio_samples": samples,
        }


def check_steps(n_gen: int, repeats: int) -> None:
    if n_gen * (repeats + 1) > _PER_SEQUENCE // 2:
        raise ValueError(
            f"--n-gen {n_gen} and --repeats {repeats}: a sequence has {_PER_SEQUENCE} tokens: "
            f"use a smaller value for one of them"
        )


def _cells(rows: Sequence[AgedRow]) -> Cells:
    return [["cache", "attention", "fresh, ms a step", "aged, ms a step", "aged to fresh", ""]] + [
        [
            row.name,
            row.attention or NONE,
            number(row.fresh_ms, ".2f"),
            number(row.aged_ms, ".2f"),
            number(row.ratio, ".2f"),
            spread(row.ratio_low, row.ratio, row.ratio_high, row.ratio_samples),
        ]
        for row in rows
    ]


TABLE = Table(
    row=AgedRow,
    title="A step of {} sequences that have come and gone for 1,000 steps",
    by=lambda row: row.n_seq,
    cells=_cells,
)
TEST = BenchTest(
    name="aged",
    measures="tokens per second of a cache that many clients have used for long",
    flags=("--flash-attn", "--clients", "--n-gen", "--repeats"),
    tables=(TABLE,),
    prepare=prepare,
    check=lambda options: check_steps(options.n_gen, options.repeats),
)
