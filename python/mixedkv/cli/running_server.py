"""Asks a running server for `mixedkv ps` and `mixedkv stop`, over the API that Ollama's commands use."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from mixedkv.cli.words import add

DEFAULT_URL = "http://127.0.0.1:8000"
_SECONDS = 10.0
_MOST = 1 << 24  # bytes of an answer


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that `ask` reads."""
    add(parser, "--url", "URL", f"the server's address (default: {DEFAULT_URL})", default=DEFAULT_URL)
    add(parser, "--api-key", "KEY", "key of a server that wants one (default: the variable MIXEDKV_API_KEY)")


def ask(args: argparse.Namespace, method: str, path: str, body: Any = None) -> dict[str, Any]:
    """Return the JSON object that a server answers.

    Raises:
        ValueError: no server answers there, it wants a key, it refuses, or it is a server of something else;
            the message names the address.
    """
    if not _is_address(args.url):
        raise ValueError(f"--url {args.url}: write http://HOST:PORT")
    headers = {"Content-Type": "application/json"} | _key_header(args)
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(args.url.rstrip("/") + path, data, headers, method=method)
    # a server in the own network
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _StayHere)
    try:
        with opener.open(request, timeout=_SECONDS) as answer:
            found = json.loads(answer.read(_MOST))
    except urllib.error.HTTPError as error:
        if 300 <= error.code < 400:
            raise _stranger(args, f"it points to {error.headers.get('Location')}") from None
        raise ValueError(f"{args.url} answers {error.code}: {_reason(error)}") from None
    except http.client.HTTPException:  # before OSError: some are both
        raise _stranger(args, f"{path} gives no answer of HTTP") from None
    except OSError as error:
        cause = getattr(error, "reason", None) or error
        why = getattr(cause, "strerror", None) or cause
        raise ValueError(
            f"no server answers at {args.url} ({why}): start one with mixedkv serve, or give the address of "
            "yours with --url"
        ) from None
    except ValueError:
        raise _stranger(args, f"{path} gives no JSON") from None
    if not isinstance(found, dict):
        raise _stranger(args, f"{path} gives no JSON object")
    return found


def ask_list(
    args: argparse.Namespace, path: str, name: str, expected: Mapping[str, type]
) -> list[dict[str, Any]]:
    """Return a list of objects that a server answers.

    Args:
        name: of the list in the answer.
        expected: fields that each object must have, and their types.

    Raises:
        ValueError: as `ask`.
    """
    found = ask(args, "GET", path).get(name)
    if not isinstance(found, list) or not all(
        isinstance(each, dict) and all(isinstance(each.get(field), kind) for field, kind in expected.items())
        for each in found
    ):
        raise _stranger(args, f"{path} gives no {name} with {', '.join(expected)}")
    return found


class _StayHere(urllib.request.HTTPRedirectHandler):
    """Follow nobody to another address, which would get the key."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _stranger(args: argparse.Namespace, why: str) -> ValueError:
    return ValueError(f"{args.url} is no server of models: {why}")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host, _ = (parts.hostname or "").encode("idna"), parts.port
    except ValueError:
        return False
    plain = url.isprintable() and " " not in url and parts.path.isascii() and parts.username is None
    return parts.scheme in ("http", "https") and bool(host) and plain


def _key_header(args: argparse.Namespace) -> dict[str, str]:
    key = args.api_key or os.environ.get("MIXEDKV_API_KEY", "")
    if not (key.isascii() and key.isprintable()):
        source = "--api-key" if args.api_key else "MIXEDKV_API_KEY"
        raise ValueError(f"{source}: a key has one line of ASCII characters")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _reason(error: urllib.error.HTTPError) -> str:
    if error.code == 401:
        return "it wants a key: give --api-key, or set MIXEDKV_API_KEY"
    try:
        said = json.loads(error.read(_MOST))["error"]
        return str(said["message"] if isinstance(said, dict) else said)
    except (ValueError, KeyError, TypeError):
        return "this is no server of models" if error.code == 404 else error.reason
