"""A model in less memory than it takes: layers that are streamed, against plain mmap and the disk itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from mixedkv.limits import padded
from mixedkv.streaming.streaming import Mode
from mixedkv_bench.bench_test import Bench, BenchTest, Measure
from mixedkv_bench.harness import streaming_run
from mixedkv_bench.harness.disk_rate import disk_rate
from mixedkv_bench.harness.memory_group import Kind, MemoryGroup, memory_group
from mixedkv_bench.harness.page_cache import drop_cached
from mixedkv_bench.harness.row import Row
from mixedkv_bench.harness.table import NONE, Cells, Table, as_bytes, number
from mixedkv_bench.options import Options

MODES: tuple[Mode, ...] = ("direct", "prefetch", "mmap")


class StreamingRow(Row):
    """One row per setting, limit and mode, each measured in a process and a control group of its own.

    It reads `--n-prompt` tokens in micro-batches of 512 and generates `--n-gen`, then as many answers at a
    time as the most of `--clients`. Last comes an answer of eight times `--n-gen` tokens by prompt lookup.
    That one repeats a token: a bias sees to it, since random weights do not, so every draft comes, and it is
    the most that drafts can bring. "resident" has no limit: what the others' logits are compared with.
    Weights are repacked in no mode.
    """

    test: Literal["streaming"] = "streaming"
    mode: Mode = Field(description='`"direct"`, `"prefetch"`, `"mmap"` (as llama.cpp has it) or `"resident"`')
    memory_bytes: int | None = Field(default=None, description="limit of the process; null: none")
    limited_by: Kind = Field(description="what held it to that")
    n_streamed: int | None = Field(default=None, description="layers that do not stay in memory")
    bytes_pass: int | None = Field(default=None, description="of these layers, which each pass reads")
    load_seconds: float | None = Field(default=None, description="until the model could be used")
    prefill_tps: float | None = Field(default=None, description="tokens per second of the prompt")
    pass_seconds: float | None = Field(default=None, description="seconds for a token, median")
    pass_samples: list[float] | None = Field(default=None, description="of all tokens, in order")
    streams: int | None = Field(default=None, description="answers at a time")
    streams_tps: float | None = Field(default=None, description="tokens per second of these in all")
    lookup_tps: float | None = Field(default=None, description="tokens per second of the repeated token")
    lookup_tokens: float | None = Field(default=None, description="tokens of it in each pass")
    disk_rate: float | None = Field(
        default=None,
        description="bytes a second that the disk gives when it is read in order, the best of what was "
        "measured before and after",
    )
    read_rate: float | None = Field(
        default=None, description="bytes a second that the process read from the disk while it generated"
    )
    share_of_disk: float | None = Field(default=None, description="read_rate / disk_rate")
    share_waiting: float | None = Field(
        default=None, description="of the time of passes: waiting for layers that were not there"
    )
    o_direct: bool | None = Field(default=None, description="past the page cache")
    mmap_ratio: float | None = Field(
        default=None, description="seconds for a token of mmap at this limit / of this"
    )
    same_logits: bool | None = Field(
        default=None, description='all logits are those of "resident", to the bit'
    )
    peak_bytes: int | None = Field(
        default=None, description="most that the group took, its page cache included"
    )
    pushed: int | None = Field(
        default=None,
        description="how often the group came to its limit, so that pages went; not with version 1",
    )
    killed: int | None = Field(default=None, description="processes that the system ended for it")


def prepare(bench: Bench) -> Measure:
    return lambda: measure(bench)


def measure(bench: Bench) -> None:
    """Add one row per setting, limit and mode, and one without a limit."""
    options = bench.options
    bench.progress.add(len(options.settings) * (1 + len(options.memory) * len(options.stream_modes)))
    for setting in options.settings:
        base = {"kv": setting.spec, "flash_attn": setting.flash_attn, "threads": options.threads}
        resident = _run(bench, setting.spec, "resident", None)
        reference = resident.pop("logits", None)
        bench.add(_row(base, resident))
        for limit in options.memory:
            rows: list[StreamingRow] = []
            slow = None
            for mode in sorted(
                options.stream_modes, key=MODES.index, reverse=True
            ):  # what the others are compared with comes first
                row = _run(bench, setting.spec, mode, limit)
                logits = row.pop("logits", None)
                if logits and reference:
                    row["same_logits"] = logits == reference
                if mode == "mmap":
                    slow = row.get("pass_seconds")
                elif slow and "pass_seconds" in row:
                    row["mmap_ratio"] = slow / row["pass_seconds"]
                rows.append(_row(base, row))
            for made in reversed(rows):
                bench.add(made)


def _run(bench: Bench, kv: str, mode: Mode, limit: int | None) -> dict[str, Any]:
    options = bench.options
    bench.progress.show(f"streaming: {kv}, {mode}" + (f" in {as_bytes(limit)}" if limit else ""))
    streams = max(options.clients)
    request = {
        "model": str(options.file.path),
        "kv": kv,
        "mode": mode,
        "threads": options.threads,
        "n_ctx": options.n_ctx_client or padded(options.n_prompt + (9 + streams) * (options.n_gen + 16)),
        "n_prompt": options.n_prompt,
        "n_gen": options.n_gen,
        "streams": streams,
        "layers": options.stream_layers,
    }
    drop_cached([options.file.path])
    row: dict[str, Any] = {"mode": mode, "memory_bytes": limit, "limited_by": "none"}
    if limit is not None:
        row["disk_rate"] = disk_rate(options.file.path)
        with memory_group(limit) as group:
            row["limited_by"] = group.kind
            found = streaming_run.in_group(group, request)
            used = group.used()
        row["disk_rate"] = max(row["disk_rate"], disk_rate(options.file.path))
        names = {"peak_bytes": "peak", "pushed": "pushed", "killed": "killed"}
        row.update({field: used[name] for field, name in names.items() if name in used})
    else:
        found = streaming_run.in_group(MemoryGroup("none", None), request)
    bench.progress.step()
    return {**row, **_numbers(found, options, row.get("disk_rate"))}


def _numbers(found: dict[str, Any], options: Options, disk: float | None) -> dict[str, Any]:
    if "error" in found:
        return found
    samples = found["pass_seconds"]
    row = {
        "logits": found["logits"],
        "load_seconds": found["load_seconds"],
        "prefill_tps": options.n_prompt / found["prefill_seconds"],
        "pass_seconds": float(np.median(samples)),
        "pass_samples": samples,
        "read_rate": found["disk_bytes"] / sum(samples),
    }
    for name in (
        "n_streamed",
        "bytes_pass",
        "share_waiting",
        "o_direct",
        "lookup_tps",
        "lookup_tokens",
    ):
        if name in found:
            row[name] = found[name]
    if "streams_tps" in found:
        row.update(streams=max(options.clients), streams_tps=found["streams_tps"])
    if disk:
        row["share_of_disk"] = row["read_rate"] / disk
    return row


def _row(base: dict[str, Any], row: dict[str, Any]) -> StreamingRow:
    return StreamingRow.model_validate({**base, **row})


def check(options: Options) -> None:
    if not options.memory:
        raise ValueError("--memory is missing: limits to measure at, e.g. --memory 1GiB,2GiB")


def _cells(rows: Sequence[StreamingRow]) -> Cells:
    return [
        [
            "mode",
            "memory",
            "layers read",
            "bytes a pass",
            "prefill, tokens/s",
            "seconds a token",
            "mmap / this",
            "read, MB/s",
            "of the disk",
            "waiting",
            "streams, tokens/s",
            "lookup, tokens/s",
            "peak",
            "logits",
        ]
    ] + [
        [
            row.mode,
            as_bytes(row.memory_bytes),
            number(row.n_streamed, "d"),
            as_bytes(row.bytes_pass),
            number(row.prefill_tps, ".1f"),
            number(row.pass_seconds, ".3f"),
            number(row.mmap_ratio, ".2f"),
            number(row.read_rate / 1e6 if row.read_rate is not None else None, ".0f"),
            number(row.share_of_disk, ".0%"),
            number(row.share_waiting, ".0%"),
            f"{row.streams}: {row.streams_tps:.2f}" if row.streams_tps else NONE,
            f"{row.lookup_tps:.2f} ({row.lookup_tokens:.1f} a pass)" if row.lookup_tps else NONE,
            as_bytes(row.peak_bytes),
            NONE if row.same_logits is None else "the same" if row.same_logits else "others",
        ]
        for row in rows
    ]


TABLE = Table(row=StreamingRow, title="Layers streamed, cache {}", by=lambda row: row.kv, cells=_cells)
TEST = BenchTest(
    name="streaming",
    measures="models larger than memory: tokens per second by how much may be in memory",
    flags=("--memory", "--stream-layers", "--stream-mode", "--clients", "--n-ctx", "--n-prompt", "--n-gen"),
    tables=(TABLE,),
    prepare=prepare,
    check=check,
    weights=False,
)
