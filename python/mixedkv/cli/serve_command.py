"""`mixedkv serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, cast, get_args

from mixedkv.cli.extra import naming_the_extra
from mixedkv.cli.words import add_place, add_words, flags, take_words, tokens

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    with naming_the_extra("server"):
        from mixedkv.server.settings import ENV_PREFIX, ServerSettings

    parser.description = "Serve a model over HTTP: OpenAI's API with continuous batching and KV that is kept."
    parser.epilog = (
        f"Each option can also be an environment variable ({ENV_PREFIX}N_CTX=8192) or a line of a "
        f"TOML file (n_ctx = 8192). The command line comes first, then the environment, then the file. "
        f"See docs/server.md."
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with options")
    for name, option in ServerSettings.model_fields.items():
        _add(parser, name, option)
    add_words(parser, "append")
    add_place(parser, nargs="*")
    parser.set_defaults(command=run)


def _add(parser: argparse.ArgumentParser, name: str, option: FieldInfo) -> None:
    names = flags(name)
    text, kind = option.description or "", type(option.default)
    if option.default is None:  # a number that need not be given
        kind = next(each for each in get_args(option.annotation) if each is not type(None))
    if kind is bool:
        parser.add_argument(*names, action=argparse.BooleanOptionalAction, default=None, help=text)
        return
    if kind is tuple:
        metavar = cast("dict[str, str]", option.json_schema_extra)["metavar"]
        parser.add_argument(*names, metavar=metavar, action="append", default=None, help=text)
        return
    if option.default not in (None, "", 0) and "default" not in text:
        text += f" (default: {option.default})"
    metavar = cast("dict[str, str]", option.json_schema_extra)["metavar"]
    read = tokens if name == "n_ctx" else str if metavar == "SIZE" else kind
    parser.add_argument(*names, metavar=metavar, type=read, default=None, help=text)


def run(args: argparse.Namespace) -> None:
    from mixedkv.server.settings import ServerSettings, load_settings

    take_words(args)
    args.model = [*(args.model or ()), *args.in_place] or None
    options = {name: getattr(args, name) for name in ServerSettings.model_fields}
    given = {name: value for name, value in options.items() if value is not None}
    settings = load_settings(given, args.config)
    with naming_the_extra("server"):
        from mixedkv.server.serve import serve
    serve(settings)
