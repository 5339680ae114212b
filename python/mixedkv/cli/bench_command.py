"""`mixedkv bench`: what a cache setting takes and gives, against llama.cpp's own."""

from __future__ import annotations

import argparse

from mixedkv.bench import arguments
from mixedkv.bench.harness.cache_settings import DEFAULT_SPECS
from mixedkv.bench.run import bench


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure cache settings side by side, against llama.cpp's own."
    parser.epilog = f"Settings without --kv: {', '.join(DEFAULT_SPECS)}. The rows: docs/bench-schema.md."
    arguments.add_arguments(parser)
    parser.set_defaults(command=bench)
