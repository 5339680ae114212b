"""`mixedkv stop`: unloads a model of a running server."""

from __future__ import annotations

import argparse
import time

from mixedkv.cli.running_server import add_server_arguments, ask, ask_list
from mixedkv.nearest_word import did_you_mean

_PATIENCE = 60.0  # seconds in which its running answers may end and its KV may be stored
_LOOK_SECONDS = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Unload a model of a running server that serves several: what runs may end, KV is stored, and the "
        "next request that names the model loads it again."
    )
    parser.add_argument("name", metavar="MODEL", help="the model's name, as mixedkv ps shows it")
    add_server_arguments(parser)
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> None:
    models = [each["id"] for each in ask_list(args, "/v1/models", "data", {"id": str})]
    if args.name not in models:
        hint = did_you_mean(args.name, models)
        raise ValueError(f"{args.url} serves no model {args.name!r}{hint}: it has {', '.join(models)}")
    if "models" not in ask(args, "GET", "/health"):
        raise ValueError(
            f"{args.url} serves one model, which stays in memory until the server ends: press Ctrl-C there, "
            "or send its process SIGTERM. Servers with several models or --keep-alive unload them"
        )
    if args.name not in _loaded(args):
        print(f"{args.name} is not in memory")
        return
    ask(args, "POST", "/api/generate", {"model": args.name, "keep_alive": 0})
    end = time.monotonic() + _PATIENCE
    while args.name in _loaded(args):
        if time.monotonic() > end:
            raise ValueError(f"{args.name} still answers requests: it is unloaded when these end")
        time.sleep(_LOOK_SECONDS)
    print(f"{args.name} is unloaded")


def _loaded(args: argparse.Namespace) -> list[str]:
    return [each["name"] for each in ask_list(args, "/api/ps", "models", {"name": str})]
