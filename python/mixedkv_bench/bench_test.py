"""Base of the tests of `mixedkv bench`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mixedkv_bench.harness.contexts import LoadedModel
from mixedkv_bench.harness.progress import Bar
from mixedkv_bench.harness.row import Row
from mixedkv_bench.harness.table import Table
from mixedkv_bench.options import Options


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """A test's surroundings: a model in memory, what was asked for, and where its rows go."""

    model: LoadedModel
    options: Options
    progress: Bar
    add: Callable[[Row], None]


Measure = Callable[[], None]


def _accept(_options: Options) -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchTest:
    """A test: what it is called, how its rows look, and how it is done.

    Attributes:
        measures: what it measures, for `--help`.
        flags: those of `mixedkv_bench.flags` that it reads, besides the ones of every test.
        check: raises ValueError if the options are not for this test; before a model is loaded.
        prepare: makes what measures. It raises ValueError if that cannot be, before anything is measured.
        in_all: whether `mixedkv bench all` means this one too.
        weights: whether it evaluates with the model in `Bench`.
    """

    name: str
    measures: str
    flags: tuple[str, ...]
    tables: tuple[Table[Any], ...]
    prepare: Callable[[Bench], Measure]
    check: Callable[[Options], None] = _accept
    in_all: bool = False
    weights: bool = True
