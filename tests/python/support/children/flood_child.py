"""One tenant's attacks, from many connections at once:

    python -m support.children.flood_child PORT KEY THREADS SECONDS NAME

A process of its own, so that what it takes is not the test's. Prints JSON: how often each status came, 0 for
none.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from support.clients.hostile_clients import Hostile

_TEXT, _CHAT = "/v1/completions", "/v1/chat/completions"
_WORDS = [
    "lamp",
    "key",
    "harbour",
    "coin",
    "market",
    "walnut",
    "compass",
    "river",
    "in",
    "under",
    "the",
    "sold",
]
_PATIENCE = 60.0
_PAUSE = 0.02
Made = tuple[str, Any, float]  # path, body, seconds after which the client leaves


def words(rng: random.Random, n: int) -> str:
    return " ".join(rng.choices(_WORDS, k=n))


def _text(rng: random.Random, n_words: int, n_tokens: int, leave: float = _PATIENCE, **more: Any) -> Made:
    body = {"prompt": words(rng, n_words), "max_tokens": n_tokens, "ignore_eos": True, "stream": True, **more}
    return _TEXT, body, leave


def _schema(rng: random.Random, schema: dict[str, Any]) -> Made:
    form = {"type": "json_schema", "json_schema": {"name": f"x{rng.randrange(10**9)}", "schema": schema}}
    message = {"role": "user", "content": "x"}
    return _CHAT, {"messages": [message], "max_tokens": 2, "response_format": form}, _PATIENCE


def _same(n: int) -> dict[str, Any]:
    """A schema of many members that are alike, each behind a chain of references."""
    names: dict[str, Any] = {f"{i}": {"$ref": f"#/d/{i + 1}"} for i in range(98)}
    names["98"] = {"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"]}
    return {"d": names, "oneOf": [{"$ref": "#/d/0"}] * n}


def _names(rng: random.Random) -> dict[str, Any]:
    name = f"p{rng.randrange(10**9)}"
    return {"type": "object", "patternProperties": {f"^{name}{i}[a-z]*$": {} for i in range(900)}}


# attacks on the engine's places, cells and steps, then those of the issue "A server in the open"
REQUESTS: dict[str, Callable[[random.Random], Made]] = {
    "prompts that fill the context": lambda r: _text(r, 1500, 100),
    "long answers": lambda r: _text(r, 20, 600),
    "prompts of clients that leave": lambda r: _text(r, 1500, 50, leave=r.uniform(0.05, 2)),
    "eight answers at a time": lambda r: _text(r, 300, 60, n=8, temperature=1.0),
    "many short requests": lambda r: _text(r, 5, 2),
    "prompts without answers": lambda r: _text(r, 1800, 1),
    "patterns for names": lambda r: _schema(r, _names(r)),
    "a oneOf of 200": lambda r: _schema(r, _same(200)),
    "brackets": lambda r: (
        _TEXT,
        {"prompt": "x", "max_tokens": 1, "grammar": "root ::= " + "[" * 32_000},
        60,
    ),
    "a text that slides": lambda r: (
        _TEXT,
        {"prompt": words(r, 2) + "a" * 7_000_000, "max_tokens": 1, "overflow": "slide"},
        2.0,
    ),
    "a long name of a field": lambda r: (_TEXT, {"prompt": "x", "max_tokens": 1, "a" * 7_600_000: 1}, 60),
    "log-probabilities": lambda r: (
        _TEXT,
        {"prompt": [[65 + i % 100 for i in range(2000)]] * 8, "max_tokens": 1, "prompt_logprobs": 20},
        60,
    ),
}
CONNECTIONS: dict[str, bytes] = {
    "heads that never end": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ",
    "bodies that never end": b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000\r\n\r\n{",
    "bodies that hide a request": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Length: 60\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
}
UTF_16 = "bodies in UTF-16"
NAMES = [*REQUESTS, *CONNECTIONS, UTF_16, "many answers", "a wide schema", "many inputs", "unknown fields"]


def send(port: int, data: bytes, leave: float) -> int:
    """The status; who does not get one in time hangs up with a reset, else the answer is read to its end."""
    with socket.create_connection(("127.0.0.1", port), timeout=leave) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(data)
        status = int(connection.recv(65536).split()[1])
        while connection.recv(65536):
            pass
        return status


def _post(key: str, path: str, data: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def attack_of(name: str, port: int, key: str, rng: random.Random) -> Callable[[], int]:
    """What sends an attack once and returns the status."""
    if name in CONNECTIONS:
        return lambda: send(port, CONNECTIONS[name], 5.0)
    if name == UTF_16:
        data = ("\u0122" + json.dumps({"prompt": [[]] * 200_000})).encode("utf-16")
        return lambda: send(port, _post(key, _TEXT, data), _PATIENCE)
    if name not in REQUESTS:
        return Hostile(port, key, 0).attack(name)

    def ask() -> int:
        path, body, leave = REQUESTS[name](rng)
        return send(port, _post(key, path, json.dumps(body).encode()), leave)

    return ask


def run(port: int, key: str, n_threads: int, seconds: float, name: str) -> Counter[int]:
    counts: Counter[int] = Counter()
    end = time.monotonic() + seconds

    def repeat(seed: int) -> None:
        attack = attack_of(name, port, key, random.Random(f"{name} {seed}"))
        while time.monotonic() < end:
            status = 0
            with suppress(OSError, ValueError, IndexError):
                status = attack()
            counts[status] += 1
            time.sleep(0.5 if status == 429 else _PAUSE)

    threads = [threading.Thread(target=repeat, args=(i,), daemon=True) for i in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return counts


if __name__ == "__main__":
    given = sys.argv
    print(json.dumps(run(int(given[1]), given[2], int(given[3]), float(given[4]), given[5])), flush=True)
