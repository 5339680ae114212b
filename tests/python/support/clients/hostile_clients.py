"""Clients that want to do harm: each attack of the suite again and again, from many threads at once."""

from __future__ import annotations

import itertools
import json
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_TIMEOUT = 120.0
_LEAVE = 3.0  # seconds: who asks for much does not wait for it
_BIG = 7_900_000  # bytes: below the limit of 8 MB
_CHAT, _TEXT, _SESSION = "/v1/chat/completions", "/v1/completions", "/v1/context"


def _json(body: Any) -> bytes:
    return json.dumps(body).encode()


def attacks_in_one_request() -> dict[str, tuple[str, bytes]]:
    """Path and body of each attack that is one request."""
    parts, messages = ",".join(["{}"] * (_BIG // 3)), ",".join(['{"role":1}'] * 100_000)
    fields = ",".join(f'"f{i}":0' for i in range(600_000))
    deep = "[" * 100_000 + "]" * 100_000
    pattern = "(a{900}){900}"
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
    return {
        "a million empty parts": (_CHAT, f'{{"messages":[{{"role":"user","content":[{parts}]}}]}}'.encode()),
        "a hundred thousand bad messages": (_CHAT, f'{{"messages":[{messages}]}}'.encode()),
        "unknown fields": (_CHAT, f"{{{fields}}}".encode()[:_BIG] + b"}"),
        "tokens that are none": (_TEXT, b'{"prompt":[' + b"-1," * (_BIG // 3) + b"-1]}"),
        "a nest of lists": (_TEXT, f'{{"prompt":{deep}}}'.encode()),
        "one letter": (_TEXT, _json({"prompt": "a" * 26_000, "max_tokens": 1})),
        "a line of spaces": (_TEXT, _json({"prompt": " " * 1_000_000, "max_tokens": 1})),
        "a large text": (_TEXT, _json({"prompt": "the lamp " * (_BIG // 9)})),
        "half a surrogate": (_SESSION, b'{"model":"m","prompt":"\\ud800"}'),
        "a large pattern": (_TEXT, _json({"prompt": "a", "regex": pattern, "max_tokens": 2})),
        "a wide schema": (
            _CHAT,
            _json({
                "messages": [{"role": "user", "content": "x"}],
                "max_tokens": 2,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": wide}},
            }),
        ),
        "a recursive grammar": (_TEXT, _json({"prompt": "a", "grammar": "root ::= root root"})),
        "a large session": (_SESSION, _json({"model": "m", "prompt": "x " * 60_000, "ttl": 31_536_000})),
        "a session": (_SESSION, _json({"model": "m", "prompt": "once upon a time " * 20, "ttl": 31_536_000})),
        "warming": ("/v1/warm", _json({"prompt": "warm me " * 100})),
        "many inputs": ("/v1/embeddings", _json({"model": "m", "input": ["a b c"] * 2048})),
        "many answers": (_TEXT, _json({"prompt": "a", "n": 64, "max_tokens": 100_000, "ignore_eos": True})),
    }  # fmt: skip


class Hostile:
    """Threads with the keys of a tenant that means no good. `counts` tells how often each attack met each
    status, 0 for a connection that was closed without one.

    Args:
        pause: seconds between the beginnings of two requests at least.
    """

    def __init__(self, port: int, key: str, n_threads: int, pause: float = 0.0) -> None:
        self.port, self._key = port, key
        self._pause, self._begin = pause, 0.0
        self.counts: Counter[tuple[str, int]] = Counter()
        self._stop = threading.Event()
        attacks: list[tuple[str, Callable[[], int]]] = [
            (name, self._sender(path, body, leave=_LEAVE if name.startswith("many") else _TIMEOUT))
            for name, (path, body) in attacks_in_one_request().items()
        ]
        attacks += [
            ("a length and no body", self._only_a_length),
            ("a wrong key", self._sender(_TEXT, _json({"prompt": "a"}), key="nobody's-key-0123456789")),
            ("no HTTP", lambda: self._send(b"\x16\x03\x01\x00garbage\r\n\r\n", 10)),
            ("idle connections", self._idle),
            ("scraping", self._get("/metrics")),
            ("stats", self._get("/v1/stats")),
            ("a list", self._get("/v1/context?limit=1000")),
        ]
        self._by_name = dict(attacks)
        self._attacks = itertools.cycle(attacks)
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(n_threads)]

    @property
    def n(self) -> int:
        return sum(self.counts.values())

    def attack(self, name: str) -> Callable[[], int]:
        """One attack, which returns the status."""
        return self._by_name[name]

    def run(self, seconds: float, n_requests: int, watch: Callable[[], None]) -> None:
        """For so long, and until so many requests were sent; `watch` is called ten times a second."""
        for thread in self._threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end or self.n < n_requests:
            watch()
            time.sleep(0.1)
        self._stop.set()
        for thread in self._threads:
            thread.join(_TIMEOUT)

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                name, attack = next(self._attacks)
                begin = self._begin = max(self._begin + self._pause, time.monotonic())
            self._stop.wait(begin - time.monotonic())
            status = 0
            with suppress(OSError, ValueError, IndexError):
                status = attack()
            self.counts[name, status] += 1

    def _sender(self, path: str, body: bytes, key: str = "", leave: float = _TIMEOUT) -> Callable[[], int]:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {key or self._key}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return lambda: self._send(head.encode() + body, leave)

    def _get(self, path: str) -> Callable[[], int]:
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self._key}\r\n\r\n"
        return lambda: self._send(head.encode(), _TIMEOUT)

    def _send(self, data: bytes, leave: float) -> int:
        """The status; who does not get one in time hangs up with a reset."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=leave) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(data)
            return int(connection.recv(65536).split()[1])

    def _only_a_length(self) -> int:
        head = f"POST {_TEXT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self._key}\r\n"
        return self._send(f"{head}Content-Length: 8000000\r\n\r\n".encode(), 5)

    def _idle(self) -> int:
        open_ones = [socket.create_connection(("127.0.0.1", self.port), timeout=5) for _ in range(50)]
        self._stop.wait(2)
        for connection in open_ones:
            connection.close()
        return 0
