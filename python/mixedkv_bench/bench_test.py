"""Base of the tests of `mixedkv bench`: a run's options, checked, and how a test is described and done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mixedkv.bundled import model_path
from mixedkv.chunks.chunk_reuse import Repair
from mixedkv.model.footprint import ModelShape
from mixedkv.model.gguf_file import ModelFile
from mixedkv_bench.harness.bench_peer import Peer
from mixedkv_bench.harness.cache_settings import Setting
from mixedkv_bench.harness.contexts import LoadedModel
from mixedkv_bench.harness.progress import Bar
from mixedkv_bench.harness.reuse_cases import DonorKind, Workload
from mixedkv_bench.harness.row import Row
from mixedkv_bench.harness.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """A checked request. Fields of flags that a test does not have are their defaults."""

    test: str
    file: ModelFile
    shape: ModelShape
    settings: tuple[Setting, ...]
    threads: int
    depths: tuple[int, ...]
    n_ctx: int
    n_prompt: int
    n_gen: int
    repeats: int
    fill: str
    sequences: int
    peer: Peer | None
    peer_settings: tuple[Setting, ...]
    modes: tuple[str, ...]
    tasks: tuple[str, ...]
    text: str | None
    text_source: str
    bits: tuple[float, ...]
    workloads: tuple[Workload, ...]
    n_documents: int
    donors: tuple[DonorKind, ...]
    repairs: tuple[Repair, ...]
    json: Path | None
    plot: Path | None

    @property
    def is_bundled(self) -> bool:
        return self.file.path == model_path()


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """A test's surroundings: a model in memory, what was asked for, and where its rows go."""

    model: LoadedModel
    options: Options
    progress: Bar
    add: Callable[[Row], None]


def _accept(_options: Options) -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchTest:
    """A test: what it is called, how its rows look, and how it is done.

    Attributes:
        measures: what it measures, for `--help`.
        flags: those of `mixedkv_bench.arguments` that it reads, besides the ones of every test.
        specs: the caches that are measured without --kv.
        check: raises ValueError if the options are not for this test; before a model is loaded.
        measure: adds the rows; what was measured also when it is interrupted.
        is_timed: its numbers are times, which other programs on the machine spoil.
        draw: draws its rows into a figure of matplotlib; None for a test without a plot.
    """

    name: str
    measures: str
    flags: tuple[str, ...]
    specs: tuple[str, ...]
    tables: tuple[Table[Any], ...]
    measure: Callable[[Bench], None]
    check: Callable[[Options], None] = _accept
    is_timed: bool = False
    draw: Callable[[Figure, Sequence[Row]], None] | None = None
