"""Measures what a cache takes: bytes as allocated, the peak of a whole process, and the context a budget
holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from mixedkv.config import KVSetting, MixedKVConfig, parse_kv
from mixedkv.limits import CELLS, INT32_MAX
from mixedkv.model.footprint import ModelShape, footprint
from mixedkv_bench.bench_test import Bench, BenchTest, Measure
from mixedkv_bench.harness import memory_run
from mixedkv_bench.harness.row import CacheRow
from mixedkv_bench.harness.table import Cells, Table, as_bytes, number


class MemoryRow(CacheRow):
    """One row per setting and context.

    Each is measured in a process of its own that fills the context but for the last 512 tokens and then reads
    a prompt of these.
    """

    test: Literal["memory"] = "memory"
    peak_rss_bytes: int | None = Field(
        default=None,
        description="peak resident memory of that process, weights included, from after the filling on",
    )
    budget_bytes: int | None = Field(
        default=None,
        description="bytes for the cache: `--budget`, or what the F16 cache of the longest context takes",
    )
    longest_n_ctx: int | None = Field(
        default=None, description="tokens of the longest context whose cache fits the budget, by formula"
    )


def prepare(bench: Bench) -> Measure:
    return lambda: measure(bench)


def measure(bench: Bench) -> None:
    """Add one row per setting and context, each measured in a process of its own."""
    options, progress = bench.options, bench.progress
    contexts = sorted({depth for depth in options.depths if depth} or {options.n_ctx})
    budget = options.budget or footprint(options.shape, parse_kv("f16"), contexts[-1]).bytes
    progress.add(len(options.settings) * len(contexts))
    for n_ctx in contexts:
        for setting in options.settings:
            progress.show(f"memory at {n_ctx}: {setting.name}")
            row = {
                "kv": setting.spec,
                "flash_attn": setting.flash_attn,
                "n_ctx": n_ctx,
                "threads": options.threads,
                **memory_run.in_new_process(options.file.path, setting, n_ctx, options.threads),
            }
            if options.shape.layers:
                row["budget_bytes"] = budget
                row["longest_n_ctx"] = longest_context(options.shape, setting.kv, budget)
            bench.add(MemoryRow.model_validate(row))
            progress.step()


def longest_context(shape: ModelShape, kv: KVSetting, budget: int) -> int:
    """Return the number of tokens of the longest context whose cache fits `budget` bytes, by formula; 0 if
    none does.
    """
    low, high = 0, INT32_MAX // CELLS + 1  # in units of 256 tokens, as llama.cpp allocates
    while low < high:
        middle = (low + high + 1) // 2
        if footprint(shape, kv, middle * CELLS).bytes <= budget:
            low = middle
        else:
            high = middle - 1
    n_ctx = low * CELLS
    needed = kv.quantization_threshold + kv.sink_tokens if isinstance(kv, MixedKVConfig) else 0
    return n_ctx if n_ctx >= needed else 0


def _cells(rows: Sequence[MemoryRow]) -> Cells:
    budget = as_bytes(rows[0].budget_bytes)
    return [["cache", "bytes", "bits/element", "peak of the process", f"longest context in {budget}"]] + [
        [
            row.name,
            as_bytes(row.kv_bytes),
            number(row.bits_per_element, ".2f"),
            as_bytes(row.peak_rss_bytes),
            number(row.longest_n_ctx, ","),
        ]
        for row in rows
    ]


TABLE = Table(row=MemoryRow, title="Memory of a context of {} tokens", by=lambda row: row.n_ctx, cells=_cells)
TEST = BenchTest(
    name="memory",
    measures="bytes of each cache, and the longest context that fits a budget",
    flags=("--flash-attn", "--depths", "--n-ctx", "--budget", "--n-prompt", "--n-gen"),
    tables=(TABLE,),
    prepare=prepare,
    in_all=True,
)
