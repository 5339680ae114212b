"""Carries out what `mixedkv bench` was asked for."""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from collections.abc import Sequence
from contextlib import closing

from mixedkv import system
from mixedkv_bench import arguments, plot
from mixedkv_bench.bench_test import Bench, Options
from mixedkv_bench.catalog import TESTS
from mixedkv_bench.harness.contexts import LoadedModel
from mixedkv_bench.harness.progress import Bar
from mixedkv_bench.harness.row import Row
from mixedkv_bench.output import Result, RunHead, render

_BUSY = 0.5  # load per core


def bench(args: argparse.Namespace) -> None:
    """Measure, and print the tables; after Ctrl-C, of what was measured until then."""
    options = arguments.check(args)
    command, test = shlex.join(["mixedkv", *sys.argv[1:]]), TESTS[options.test]
    if test.is_timed:
        _warn_of_load()
    with closing(Result(RunHead.of(options, command), options.json)) as result:
        try:
            with Bar() as progress, closing(LoadedModel(options.file.path)) as model:
                work = Bench(model=model, options=options, progress=progress, add=result.add)
                test.measure(work)
        except KeyboardInterrupt:
            print("interrupted: this is what was measured until then", file=sys.stderr)
            raise
        finally:
            if result.rows:
                print(render(result.head, result.rows))
                _plot(options, result.rows)


def _warn_of_load() -> None:
    """Warn where other programs are at work: their share of the processor is in every time."""
    load, cores = system.load_average(), system.usable_cpus()
    if load > _BUSY * cores:
        warnings.warn(
            f"this machine is busy (load {load:.1f} on {cores} cores): this takes longer, times vary, and "
            "only ratios between caches, which take turns, mean something. End other programs, or leave "
            "them cores with --threads",
            stacklevel=2,
        )


def _plot(options: Options, rows: Sequence[Row]) -> None:
    draw = TESTS[options.test].draw
    if options.plot is None or draw is None:
        return
    title = f"{options.shape.name}, mixedkv bench {options.test}"
    if not plot.save(options.plot, title, draw, rows):
        print(f"{options.plot} was not written: nothing was measured that could be drawn", file=sys.stderr)
