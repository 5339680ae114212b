"""Carries out what `mixedkv bench` was asked for."""

from __future__ import annotations

import argparse
import shlex
import sys
from contextlib import closing

from mixedkv_bench import arguments
from mixedkv_bench.bench_test import Bench
from mixedkv_bench.catalog import TESTS
from mixedkv_bench.harness.contexts import LoadedModel
from mixedkv_bench.harness.progress import Bar
from mixedkv_bench.output.report import render
from mixedkv_bench.output.result import Result


def bench(args: argparse.Namespace) -> None:
    """Measure, print the tables, and leave what was measured also after Ctrl-C."""
    options = arguments.check(args)
    result = Result(options.file, options.shape, _command(), options.json)
    try:
        weights = any(TESTS[name].weights for name in options.tests)
        with Bar() as progress, closing(LoadedModel(options.file.path, weights=weights)) as model:
            work = Bench(model=model, options=options, progress=progress, add=result.add)
            for measure in [TESTS[name].prepare(work) for name in options.tests]:
                measure()
        result.finish()
    finally:
        result.write()
        if result.rows:
            print(render(result.document))
            if options.plot is not None:
                from mixedkv_bench.output import plots

                for path in plots.draw(result.document, options.plot):
                    print(f"wrote {path}")


def _command() -> str:
    return shlex.join(["mixedkv", *sys.argv[1:]])
