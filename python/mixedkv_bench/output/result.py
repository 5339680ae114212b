"""The object a run makes: where it ran, what was measured. On disk it is always whole."""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path

import llama_cpp
import numpy as np

from mixedkv.atomic_write import write_atomically
from mixedkv.model.footprint import ModelShape
from mixedkv.model.gguf_file import ModelFile
from mixedkv_bench.catalog import Document, Machine, ModelFacts, Versions
from mixedkv_bench.harness.row import Row


class Result:
    """Rows as they come in; with a path, the file follows each row."""

    def __init__(self, file: ModelFile, shape: ModelShape, command: str, path: Path | None) -> None:
        self._path = path
        self.rows: list[Row] = []
        self._document = Document(
            schema="mixedkv.bench/1",
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            command=command,
            interrupted=True,  # until `finish`
            machine=_machine(),
            versions=_versions(),
            model=_model(file, shape),
            rows=[],
        )

    @property
    def document(self) -> Document:
        return self._document.model_copy(update={"rows": self.rows})

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.write()

    def finish(self) -> None:
        """Finish the file: everything asked for has been measured."""
        self._document = self._document.model_copy(update={"interrupted": False})
        self.write()

    def write(self) -> None:
        if self._path is not None:
            write_atomically(self._path, json.dumps(self.document.as_json(), indent=1) + "\n")


def _machine() -> Machine:
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.machine()}",
        load_average=[round(x, 2) for x in os.getloadavg()],
    )


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _versions() -> Versions:
    from mixedkv import __version__, _core

    native = _core.version()
    return Versions(
        mixedkv=__version__,
        llama_commit=native["llama_commit"],
        isa=native["isa"],
        llama_cpp_python=llama_cpp.__version__,
        python=platform.python_version(),
        numpy=np.__version__,
    )


def _model(file: ModelFile, shape: ModelShape) -> ModelFacts:
    return ModelFacts(
        file=file.path.name,
        name=shape.name,
        architecture=shape.architecture,
        bytes=file.size,
        n_layer=shape.n_layer,
        n_head=sorted(set(shape.n_head)),
        n_head_kv=sorted({layer.n_head_kv for layer in shape.layers}),
        head_size_k=sorted({layer.head_k for layer in shape.layers}),
        head_size_v=sorted({layer.head_v for layer in shape.layers}),
        n_ctx_train=shape.n_ctx_train,
    )
