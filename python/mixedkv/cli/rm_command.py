"""`mixedkv rm`: removes downloaded models from this machine."""

from __future__ import annotations

import argparse

from mixedkv.model.removal import remove_model
from mixedkv.sizes import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Remove models that were downloaded by their names. Files that were given by their path are left "
        "alone, and so is KV in a store (mixedkv cache rm)."
    )
    parser.add_argument("names", metavar="MODEL", nargs="+", help="a name, as mixedkv models shows it")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> None:
    for name in args.names:
        print(f"{name}: removed, {format_bytes(remove_model(name))}")
