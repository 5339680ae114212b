"""The tests of `mixedkv bench`, and the object that their rows make."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mixedkv_bench import (
    aged,
    fleet,
    memory,
    quality,
    quick,
    recall,
    reuse,
    sensitivity,
    serve,
    speculation,
    speed,
    split,
    store,
    streaming,
    tasks,
)
from mixedkv_bench.aged import AgedRow
from mixedkv_bench.fleet import FleetRow, ResumeRow
from mixedkv_bench.harness.row import RowPart
from mixedkv_bench.memory import MemoryRow
from mixedkv_bench.quality import QualityRow
from mixedkv_bench.quick import QuickRow
from mixedkv_bench.recall import RecallRow
from mixedkv_bench.reuse import ReuseRow
from mixedkv_bench.sensitivity import SensitivityRow
from mixedkv_bench.serve import ServeRow, StallRow
from mixedkv_bench.speculation import SpeculationRow
from mixedkv_bench.speed import SpeedRow
from mixedkv_bench.split import SplitRow
from mixedkv_bench.split_clients import SplitClientsRow
from mixedkv_bench.store import ChatRow, StoreRow
from mixedkv_bench.streaming import StreamingRow
from mixedkv_bench.tasks import TasksRow

TESTS = {
    module.TEST.name: module.TEST
    for module in (
        quick,
        memory,
        speed,
        aged,
        quality,
        sensitivity,
        recall,
        tasks,
        store,
        reuse,
        serve,
        fleet,
        split,
        speculation,
        streaming,
    )
}  # in the order of `all`

AnyRow = Annotated[
    QuickRow
    | MemoryRow
    | SpeedRow
    | AgedRow
    | QualityRow
    | SensitivityRow
    | RecallRow
    | TasksRow
    | StoreRow
    | ChatRow
    | ReuseRow
    | ServeRow
    | StallRow
    | FleetRow
    | ResumeRow
    | SplitRow
    | SplitClientsRow
    | SpeculationRow
    | StreamingRow,
    Field(discriminator="test"),
]


class Machine(RowPart):
    cpu: str = Field(description="name of the processor")
    cores: int = Field(description="cores it may use")
    memory_bytes: int = Field(description="memory of the machine")
    system: str = Field(description="operating system and architecture")
    load_average: list[float] = Field(description="of 1, 5 and 15 minutes, at the start")


class Versions(RowPart):
    mixedkv: str = Field(description="this package")
    llama_commit: str = Field(description="commit of llama.cpp")
    isa: str = Field(description="instruction set of the kernels")
    llama_cpp_python: str = Field(description="llama-cpp-python")
    python: str = Field(description="Python")
    numpy: str = Field(description="numpy")


class ModelFacts(RowPart):
    file: str = Field(description="name of the file")
    name: str = Field(description="name of the model")
    architecture: str = Field(description="as llama.cpp calls it")
    bytes: int = Field(description="size of the file")
    n_layer: int = Field(description="layers")
    n_head: list[int] = Field(description="distinct numbers of query heads")
    n_head_kv: list[int] = Field(description="distinct numbers of KV heads")
    head_size_k: list[int] = Field(description="distinct sizes of a K head")
    head_size_v: list[int] = Field(description="distinct sizes of a V head")
    n_ctx_train: int = Field(description="longest context in training")


class Document(RowPart):
    """The JSON object that a run writes."""

    schema_: Literal["mixedkv.bench/1"] = Field(
        alias="schema",
        description='`"mixedkv.bench/1"`. A field that changes its meaning or goes makes it `/2`; a new one '
        "does not",
    )
    created: str = Field(description="when the run began, ISO 8601, UTC")
    command: str = Field(description="the command line")
    interrupted: bool = Field(description="true until everything asked for has been measured")
    machine: Machine = Field(description="where it ran")
    versions: Versions = Field(description="what it ran on")
    model: ModelFacts = Field(description="what was run")
    rows: list[AnyRow] = Field(description="what was measured, see below")
