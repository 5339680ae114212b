"""`mixedkv bench`: measures caches against llama.cpp's own."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `mixedkv bench`."""
    from mixedkv_bench import arguments
    from mixedkv_bench.run import bench

    parser.description = "Measure cache settings side by side, against llama.cpp's own."
    parser.epilog = "mixedkv bench TEST --help has the flags of a test."
    arguments.add_arguments(parser)
    parser.set_defaults(command=bench)
