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
from mixedkv_bench.output import Result, RunHead, render


def bench(args: argparse.Namespace) -> None:
    """Measure, and print the tables; after Ctrl-C, of what was measured until then."""
    options = arguments.check(args)
    command = shlex.join(["mixedkv", *sys.argv[1:]])
    with closing(Result(RunHead.of(options, command), options.json)) as result:
        try:
            with Bar() as progress, closing(LoadedModel(options.file.path)) as model:
                work = Bench(model=model, options=options, progress=progress, add=result.add)
                TESTS[options.test].measure(work)
        except KeyboardInterrupt:
            print("interrupted: this is what was measured until then", file=sys.stderr)
            raise
        finally:
            if result.rows:
                print(render(result.head, result.rows))
