"""`mixedkv serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse

from mixedkv.cli.words import add_place, add_words, naming_the_extra, take_words
from mixedkv_service.options import add_options, read_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    with naming_the_extra("server"):
        from mixedkv_server.settings import ServerSettings

    parser.description = "Serve a model over HTTP: OpenAI's API with continuous batching and KV that is kept."
    parser.epilog = "See docs/server.md."
    add_options(parser, ServerSettings)
    add_words(parser, "append")
    add_place(parser, nargs="*")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> None:
    from mixedkv_server.settings import ServerSettings

    take_words(args)
    args.model = [*(args.model or ()), *args.in_place] or None
    settings = read_options(args, ServerSettings)
    with naming_the_extra("server"):
        from mixedkv_server.serve import serve
    serve(settings)
