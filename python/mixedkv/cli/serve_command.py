"""`mixedkv serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
from typing import Any

_SHORT = {"model": "-m"}


def add_command(commands: Any) -> None:
    from mixedkv.server.settings import ENV_PREFIX, option_fields

    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI does",
        description="Serve a model over HTTP: OpenAI's API with continuous batching and KV that is kept.",
        epilog=f"Each option can also be an environment variable ({ENV_PREFIX}N_CTX=8192) or a line of a "
        f"TOML file (n_ctx = 8192). The command line comes first, then the environment, then the file. "
        f"See docs/server.md.",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with options")
    for option in option_fields():
        _add(parser, option)
    parser.set_defaults(command=run)


def _add(parser: argparse.ArgumentParser, option: Any) -> None:
    flags = [_SHORT[option.name]] if option.name in _SHORT else []
    flags.append("--" + option.name.replace("_", "-"))
    text = option.metadata["help"]
    if option.type == "bool":
        parser.add_argument(*flags, action=argparse.BooleanOptionalAction, default=None, help=text)
        return
    if option.default not in ("", 0) and "default" not in text:
        text += f" (default: {option.default})"
    kind = {"int": int, "float": float, "str": str}[option.type]
    parser.add_argument(*flags, metavar=option.metadata["metavar"], type=kind, default=None, help=text)


def run(args: argparse.Namespace) -> None:
    from mixedkv.server.settings import load_settings, option_fields

    given = {
        option.name: getattr(args, option.name)
        for option in option_fields()
        if getattr(args, option.name) is not None
    }
    settings = load_settings(given, args.config)
    try:
        from mixedkv.server.serve import serve
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("mixedkv"):
            raise
        raise ValueError(
            f"`mixedkv serve` needs {error.name}, which is not installed: pip install 'mixedkv[server]'"
        ) from None
    serve(settings)
