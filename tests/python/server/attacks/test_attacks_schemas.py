"""Schemas and grammars that take long."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.clients.raw_http import CHAT, connected, post
from support.patience import PATIENCE
from support.servers.server import Server

pytestmark = pytest.mark.nightly

# --- schemas and grammars that take long ---


def _chain(depth: int) -> dict[str, Any]:
    """Definitions of two objects each, which differ after what the one before says."""
    links: dict[str, Any] = {"a0": {"const": 1}}
    for i in range(depth):
        first = {"$ref": f"#/$defs/a{i}"}
        objects = [{"properties": {"a": first, "b": {"const": b}}, "required": ["a", "b"]} for b in (1, 2)]
        links[f"a{i + 1}"] = {"anyOf": objects}
    return {"$ref": f"#/$defs/a{depth}", "$defs": links}


def _hostile() -> list[dict[str, Any]]:
    """Fields of requests."""
    patterns = ["^(a?){40}a{40}$", "^(a|a)*$", "^(a{900}){900}$", "[a-z].{100}$", ".*foo", "\ud800",
                "\\ud800", "^([\\p{L}\\p{N}]{1,50}[^a]{1,50}){50}$"]  # fmt: skip
    schemas: list[dict[str, Any]] = [{"type": "string", "pattern": pattern} for pattern in patterns]
    schemas += [
        {"properties": {"a": {"$ref": "#"}}},
        {"$ref": "#"},
        _chain(12),
        _chain(150),  # 31 KiB
        {"type": "object", "properties": {f"property_{i}": {} for i in range(900)}},
        {"enum": [f"x{i}" for i in range(6000)]},  # 64 KiB
        {"enum": ["x" * 65_000]},
        {"enum": ["\ud800"]},
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
        {"type": "number", "multipleOf": 0.0009973},
    ]
    formats = [{"type": "json_schema", "json_schema": {"name": "x", "schema": schema}} for schema in schemas]
    grammars = [
        'root ::= root root | root root root | "a" | "b" | ""',
        'root ::= "a"{0,100000} a*\na ::= b | "c" | ""\nb ::= "a" a',
        "root ::= " + " ".join('"a"' for _ in range(8000)),
        "root ::= a0\n" + "\n".join(f'a{i} ::= "x" a{i + 1}' for i in range(340)) + '\na340 ::= "a"',
    ]
    return [
        *({"response_format": expected} for expected in formats),
        *({"grammar": grammar} for grammar in grammars),
        *({"regex": regex} for regex in ("(a?){40}a{40}", "(.*a.{12})+", "a" * 30_000)),
    ]


def _stream(server: Server, stop: threading.Event) -> list[float]:
    """Seconds between the pieces of streams, one after the other, until told to stop."""
    gaps = []
    body = {"prompt": "x", "max_tokens": 500, "stream": True, "ignore_eos": True}
    while not stop.is_set():
        with connected(server, post(body, "Content-Type: application/json")) as connection:
            last = None
            for line in connection.makefile("rb"):
                now = time.perf_counter()
                if line.startswith(b"data: {"):
                    gaps += [now - last] if last else []
                    last = now
                if line.startswith(b"data: [DONE]"):
                    break
            assert last, "the stream had no token"
    return gaps


def _gaps_beside(server: Server, bodies: list[dict[str, Any]]) -> tuple[list[float], list[int]]:
    """Of a stream beside these requests; and their statuses."""
    stop, statuses = threading.Event(), []
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(_stream, server, stop)
        try:
            for body in bodies:
                request = {"messages": CHAT, "max_tokens": 40, "temperature": 1.5, "seed": 1, **body}
                statuses.append(server.status("POST", "/v1/chat/completions", request))
        finally:
            stop.set()
        return future.result(PATIENCE), statuses


def test_hostile_schemas_fail_alone(server: Server) -> None:
    _, statuses = _gaps_beside(server, _hostile())
    assert set(statuses) == {200, 400}
    assert server.status("GET", "/health") == 200


@pytest.mark.bench
def test_hostile_schemas_stall_no_stream(server: Server) -> None:
    quiet, _ = _gaps_beside(server, [{}] * 30)
    gaps, _ = _gaps_beside(server, _hostile())
    worst = {"quiet": max(quiet), "all": max(gaps)}
    for i, body in enumerate(_hostile()):
        worst[f"{i} {json.dumps(body)[:90]}"] = max(_gaps_beside(server, [body] * 3)[0])
    for name, seconds in worst.items():
        print(f"{seconds * 1e3:7.1f} ms  {name}")
    assert worst["all"] < 0.1
