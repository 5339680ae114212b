"""Asks a running server for `mixedkv ps` and `mixedkv stop`, over the API that Ollama's commands use."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from typing import Any

from mixedkv.cli.words import add

DEFAULT_URL = "http://127.0.0.1:8000"
_SECONDS = 10.0
_MOST = 1 << 24  # bytes of an answer


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that `ask` reads."""
    add(parser, "--url", "URL", f"the server's address (default: {DEFAULT_URL})", default=DEFAULT_URL)
    add(parser, "--api-key", "KEY", "key of a server that wants one (default: the variable MIXEDKV_API_KEY)")


def ask(args: argparse.Namespace, method: str, path: str, body: Any = None) -> Any:
    """Return what a server answers, as JSON.

    Raises:
        ValueError: no server answers there, it wants a key, or it refuses; the message names the address.
    """
    key = args.api_key or os.environ.get("MIXEDKV_API_KEY", "")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    where = args.url.rstrip("/") + path
    if not where.startswith(("http://", "https://")):
        raise ValueError(f"--url {args.url}: write http://HOST:PORT")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a server in the own network
    try:
        with opener.open(
            urllib.request.Request(where, data, headers, method=method), timeout=_SECONDS
        ) as answer:
            return json.loads(answer.read(_MOST))
    except urllib.error.HTTPError as error:
        raise ValueError(f"{args.url} answers {error.code}: {_reason(error)}") from None
    except OSError as error:
        cause = getattr(error, "reason", None) or error
        why = getattr(cause, "strerror", None) or cause
        raise ValueError(
            f"no server answers at {args.url} ({why}): start one with mixedkv serve, or give the address of "
            "yours with --url"
        ) from None
    except ValueError:
        raise ValueError(f"{args.url} is no server of models: {path} gives no JSON") from None


def _reason(error: urllib.error.HTTPError) -> str:
    if error.code == 401:
        return "it wants a key: give --api-key, or set MIXEDKV_API_KEY"
    try:
        said = json.loads(error.read(_MOST))["error"]
        return str(said["message"] if isinstance(said, dict) else said)
    except (ValueError, KeyError, TypeError):
        return "this is no server of models" if error.code == 404 else error.reason
