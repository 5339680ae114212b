"""`mixedkv models`: lists the models on this machine, by the names that `-m` takes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from mixedkv.model.named_model import kept_models, named_models
from mixedkv.sizes import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the models on this machine: names for -m, sizes, and files."
    parser.set_defaults(command=run)


def run(_: argparse.Namespace) -> None:
    rows = list(_rows())
    width = max(len(name) for name, _, _ in rows)
    for name, size, path in rows:
        print(f"{name:<{width}}  {format_bytes(size):>9}  {path}")


def _rows() -> Iterator[tuple[str, int, Path]]:
    for name, path in named_models():
        yield name, path.stat().st_size, path
    for model in kept_models():
        yield model.name, model.size, model.path
