"""`mixedkv help`: shows the help of a command."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show the commands, or the options of one: mixedkv help serve."
    parser.add_argument("words", metavar="COMMAND", nargs="*", help="a command, and its own command")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> None:
    from mixedkv.cli.main import make_parser

    make_parser().parse_args([*args.words, "--help"])
