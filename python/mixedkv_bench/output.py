"""Output of a run: a line of JSON for where it ran and for each row, and tables for a terminal."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import llama_cpp
import numpy as np
from pydantic import Field

from mixedkv import __version__, _core, system
from mixedkv_bench.bench_test import Options
from mixedkv_bench.catalog import ROWS, TESTS, AnyRow
from mixedkv_bench.harness.row import Row, RowPart


class RunHead(RowPart):
    """The first line: what was run, where, and on what."""

    test: Literal["run"] = Field(
        default="run", description='always `"run"`: a column by which a table of all lines tells this one'
    )
    schema_: Literal["mixedkv.bench/2"] = Field(
        alias="schema",
        description='`"mixedkv.bench/2"`. A field that changes its meaning or goes makes it `/3`; a new one '
        "does not",
    )
    created: str = Field(description="when the run began, ISO 8601, UTC")
    command: str = Field(description="the command line")
    cpu: str = Field(description="name of the processor")
    cores: int = Field(description="cores it may use")
    memory_bytes: int = Field(description="memory of the machine")
    system: str = Field(description="operating system and architecture")
    load_average: float = Field(description="of the minute before")
    mixedkv: str = Field(description="version of this package")
    llama_commit: str = Field(description="commit of llama.cpp")
    isa: str = Field(description="instruction set of the kernels")
    products: str = Field(
        default="mixedkv",
        description='whose products with weights: `"mixedkv"`, or what `MIXEDKV_WEIGHTS` says',
    )
    llama_cpp_python: str = Field(description="version of llama-cpp-python")
    python: str = Field(description="version of Python")
    numpy: str = Field(description="version of numpy")
    file: str = Field(description="name of the model's file")
    model: str = Field(description="name of the model")
    architecture: str = Field(description="its architecture, as llama.cpp calls it")
    bytes: int = Field(description="size of the file")
    n_layer: int = Field(description="layers")
    n_head: list[int] = Field(description="distinct numbers of query heads")
    n_head_kv: list[int] = Field(description="distinct numbers of KV heads")
    head_size_k: list[int] = Field(description="distinct sizes of a K head")
    head_size_v: list[int] = Field(description="distinct sizes of a V head")
    n_ctx_train: int = Field(description="longest context in training")

    def model_post_init(self, _context: Any) -> None:
        self.model_fields_set.add("test")

    @classmethod
    def of(cls, options: Options, command: str) -> RunHead:
        """Return the head of a run that begins now."""
        shape, file, native = options.shape, options.file, _core.version()
        return cls(
            schema="mixedkv.bench/2",
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            command=command,
            cpu=_cpu(),
            cores=system.usable_cpus(),
            memory_bytes=system.physical_memory(),
            system=f"{platform.system()} {platform.machine()}",
            load_average=round(system.load_average(), 2),
            mixedkv=__version__,
            llama_commit=native["llama_commit"],
            isa=native["isa"],
            products=os.environ.get("MIXEDKV_WEIGHTS") or "mixedkv",
            llama_cpp_python=llama_cpp.__version__,
            python=platform.python_version(),
            numpy=np.__version__,
            file=file.path.name,
            model=shape.name,
            architecture=shape.architecture,
            bytes=file.size,
            n_layer=shape.n_layer,
            n_head=sorted(set(shape.n_head)),
            n_head_kv=sorted({layer.n_head_kv for layer in shape.layers}),
            head_size_k=sorted({layer.head_k for layer in shape.layers}),
            head_size_v=sorted({layer.head_v for layer in shape.layers}),
            n_ctx_train=shape.n_ctx_train,
        )


class Result:
    """Rows as they come in; with a path, each is a line of the file at once."""

    def __init__(self, head: RunHead, path: Path | None) -> None:
        self.head, self.rows = head, list[Row]()
        self._file = None if path is None else path.open("w", encoding="utf-8")
        self._write(head)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._write(row)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, line: RowPart) -> None:
        if self._file is not None:
            print(json.dumps(line.as_json()), file=self._file, flush=True)


def read_result(path: Path) -> tuple[RunHead, list[AnyRow]]:
    """Return what a run wrote with `--json`.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not what a run writes.
    """
    head, *rows = path.read_text(encoding="utf-8").splitlines()
    return RunHead.model_validate_json(head), [ROWS.validate_json(row) for row in rows]


def render(head: RunHead, rows: Sequence[Row]) -> str:
    """Return a report of what was run, with a table for everything there are rows of."""
    heads = (
        f", {_list(head.n_head)} query heads over {_list(head.n_head_kv)} KV heads "
        f"of size {_list(head.head_size_k)}"
    )
    lines = [
        f"{head.model}: {head.n_layer} layers{heads if head.n_head else ''}",
        f"{head.cpu}, {head.cores} cores, {head.isa} kernels, load {head.load_average:.1f} at the start",
    ]
    for test in TESTS.values():
        for table in test.tables:
            lines += table.lines(rows)
    return "\n".join(lines)


def _list(values: Sequence[int]) -> str:
    return "/".join(map(str, values))


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
