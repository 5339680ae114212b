"""`mixedkv bench`: what a cache setting takes and gives, against llama.cpp's own."""

from __future__ import annotations

from typing import Any

from mixedkv.bench.harness.cache_settings import DEFAULT_SPECS
from mixedkv.bench.options import add_arguments
from mixedkv.bench.run import bench


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure speed, memory, quality and recall of cache settings, kept KV, the server",
        description="Measure cache settings side by side, against llama.cpp's own.",
        epilog=f"Settings without --kv: {', '.join(DEFAULT_SPECS)}. The rows: docs/bench-schema.md.",
    )
    add_arguments(parser)
    parser.set_defaults(command=bench)
