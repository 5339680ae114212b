"""`mixedkv ps`: lists the models that a running server has in memory."""

from __future__ import annotations

import argparse
from datetime import datetime, timezone

from mixedkv.cli.running_server import add_server_arguments, ask_list
from mixedkv.sizes import format_bytes
from mixedkv.terminal import printable

_NEVER = 3650  # days from which on a time means that a model stays


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the models that a running server has in memory, and until when."
    add_server_arguments(parser)
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> None:
    models = ask_list(args, "/api/ps", "models", {"name": str, "size": int})
    if not models:
        print(f"{args.url}: no model is in memory; a request that names one loads it")
        return
    rows = [("name", "size", "context", "until")]
    for each in models:
        context = f"{each.get('context_length') or 0:,}"
        rows.append((str(each["name"]), format_bytes(each["size"]), context, _until(each.get("expires_at"))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, size, context, until in rows:
        print(printable(f"{name:<{widths[0]}}  {size:>{widths[1]}}  {context:>{widths[2]}}  {until}"))


def _until(at: str | None) -> str:
    """Return when a model is unloaded, if no request comes."""
    try:
        left = datetime.fromisoformat(str(at).replace("Z", "+00:00")) - datetime.now(timezone.utc)
    except ValueError:
        return "-"
    if left.days > _NEVER:
        return "the server ends"
    return f"{max(0, round(left.total_seconds()))} s from now"
