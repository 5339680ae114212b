"""`mixedkv pull`: downloads a model for other commands."""

from __future__ import annotations

import argparse

from mixedkv.model.named_model import NAMES, PREFIX, find_model, hub_model, refuse_name
from mixedkv.model.packaged_model import FOR_USERS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Download a GGUF model, of the Hugging Face Hub into the hub's cache, and print its path. What is "
        "there already is not downloaded again, unless the hub has a newer one; a download that was cut off "
        "goes on. -m takes the same name."
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        help=f"{', '.join(FOR_USERS)}, or [hf:]OWNER/REPO[:FILE]: a file's name, or its types: Q8_0 "
        "(default: Q4_K_M, or the only one)",
    )
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> None:
    if args.name in NAMES:
        print(find_model(args.name))
    elif "/" in args.name and "://" not in args.name:
        print(hub_model(PREFIX + args.name.removeprefix(PREFIX), refresh=True))
    else:
        refuse_name(args.name)
