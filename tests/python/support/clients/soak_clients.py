"""Clients that behave in every way: they ask, go away in the middle, and send what makes no sense."""

from __future__ import annotations

import http.client
import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from support.patience import PATIENCE

KEYS = ("alice-key-0123456789", "bob-key-0123456789")
MAX_BODY = 100_000
_WORDS = (
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
)
_SHARED = " ".join(random.Random(0).choices(_WORDS, k=100))
_BUSY = (200, 429, 504)  # what a good request may meet under load
_CHAT = "/v1/chat/completions"


class Clients:
    """`n` threads. `counts` tells how often each way of asking met each status, `surprises` what was not
    expected.
    """

    def __init__(self, port: int, n: int, seed: int = 0) -> None:
        self.port = port
        self.counts: Counter[tuple[str, Any]] = Counter()
        self.surprises: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(f"{seed}.{i}",)) for i in range(n)]

    def run(self, seconds: float, watch: Callable[[], None]) -> None:
        """Let them ask for so long, and until each way has been tried; `watch` is called twice a second."""
        for thread in self._threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end or (not self.has_tried_all and time.monotonic() < end + PATIENCE):
            watch()
            time.sleep(0.5)
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)
            if thread.is_alive():
                self.surprises.append("a client still waits for its answer")

    @property
    def has_tried_all(self) -> bool:
        return {way.__name__ for way, _ in WAYS} == {name for name, _ in list(self.counts)}

    def _run(self, seed: str) -> None:
        rng = random.Random(seed)
        while not self._stop.is_set():
            way, expected = rng.choice(WAYS)
            try:
                status = way(self.port, rng)
            except Exception as error:  # a connection that the server cut, a malformed answer
                status = type(error).__name__
            self.counts[way.__name__, status] += 1
            if status == 429:
                time.sleep(rng.random())
            if status not in expected:
                self.surprises.append(f"{way.__name__}: {status}")


def request(
    port: int, method: str, path: str, body: Any = None, key: str | None = KEYS[0], raw: bytes | None = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        connection.request(method, path, json.dumps(body) if raw is None else raw, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _body(rng: random.Random, **options: Any) -> dict[str, Any]:
    text = " ".join(rng.choices(_WORDS, k=rng.randint(1, 150)))
    system = {"role": "system", "content": _SHARED}
    messages = [system] * rng.randint(0, 1) + [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": rng.randint(1, 40), "ignore_eos": True, **options}


def _send(port: int, head: str, body: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n" + body)
    return connection


def _post(port: int, rng: random.Random, body: Any, length: int | None = None) -> socket.socket:
    data = json.dumps(body).encode()
    head = (
        f"POST {_CHAT} HTTP/1.1\nHost: x\nAuthorization: Bearer {rng.choice(KEYS)}\n"
        f"Content-Type: application/json\nContent-Length: {len(data) if length is None else length}\n"
    )
    return _send(port, head, data)


def _hang_up(connection: socket.socket, rng: random.Random) -> None:
    if rng.random() < 0.5:  # with a reset
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


# --- ways of asking: each returns a status, or 0 when it did not wait for one ---


def whole(port: int, rng: random.Random) -> int:
    return request(port, "POST", _CHAT, _body(rng, n=rng.choice((1, 1, 2))), rng.choice(KEYS))[0]


def streamed(port: int, rng: random.Random) -> int:
    status, data = request(port, "POST", _CHAT, _body(rng, stream=True), rng.choice(KEYS))
    if status == 200 and not data.endswith(b"data: [DONE]\n\n") and b'"error"' not in data:
        return -1
    return status


def leaves_while_waiting(port: int, rng: random.Random) -> int:
    connection = _post(port, rng, _body(rng, max_tokens=400, n=rng.choice((1, 3))))
    time.sleep(rng.random() * 0.5)
    _hang_up(connection, rng)
    return 0


def leaves_while_reading(port: int, rng: random.Random) -> int:
    connection = _post(port, rng, _body(rng, max_tokens=400, stream=True))
    try:
        connection.recv(rng.randint(1, 2000))
        time.sleep(rng.random() * 0.1)
    finally:
        _hang_up(connection, rng)
    return 0


def leaves_while_sending(port: int, rng: random.Random) -> int:
    connection = _post(port, rng, _body(rng), length=5000)
    time.sleep(rng.random() * 0.1)
    _hang_up(connection, rng)
    return 0


def leaves_while_making_a_session(port: int, rng: random.Random) -> int:
    data = json.dumps({"prompt": _SHARED + str(rng.random()), "ttl": 1}).encode()
    head = f"POST /v1/context HTTP/1.1\nHost: x\nAuthorization: Bearer {KEYS[0]}\n"
    connection = _send(port, f"{head}Content-Type: application/json\nContent-Length: {len(data)}\n", data)
    time.sleep(rng.random() * 0.1)
    _hang_up(connection, rng)
    return 0


def session(port: int, rng: random.Random) -> int:
    """Made, used and deleted."""
    text = " ".join(rng.choices(_WORDS, k=rng.randint(20, 60)))
    made, data = request(port, "POST", "/v1/context", {"model": MODEL, "prompt": text, "ttl": 6000})
    if made != 201:
        return made
    name = json.loads(data)["session_id"]
    body = {"prompt": " the", "session_id": name, "max_tokens": 4}
    used, _ = request(port, "POST", "/v1/completions", body)
    theirs, _ = request(port, "GET", f"/v1/context/{name}", key=KEYS[1])
    gone, _ = request(port, "DELETE", f"/v1/context/{name}")
    return 201 if used in _BUSY and theirs in (404, 504) and gone in (200, 504) else -1


def too_large(port: int, rng: random.Random) -> int:
    connection = _post(port, rng, {}, length=MAX_BODY * 50)
    with connection:
        return int(connection.recv(100).split()[1])


def too_large_in_chunks(port: int, rng: random.Random) -> int:
    head = f"POST {_CHAT} HTTP/1.1\nHost: x\nAuthorization: Bearer {KEYS[0]}\nTransfer-Encoding: chunked\n"
    with _send(port, head) as connection:
        chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
        for _ in range(MAX_BODY // 0x4000 + 2):
            connection.sendall(chunk)
        return int(connection.recv(100).split()[1])


def bad_json(port: int, rng: random.Random) -> int:
    good = json.dumps(_body(rng)).encode()
    raw = rng.choice((good[: rng.randrange(len(good))], b"\xff" + good, b"[" * 20_000, b"nan", b'"' + good))
    return request(port, "POST", _CHAT, key=rng.choice(KEYS), raw=raw)[0]


def unknown_fields(port: int, rng: random.Random) -> int:
    return request(port, "POST", _CHAT, _body(rng, **{rng.choice(("colour", "__class__", "x" * 500)): 1}))[0]


def wrong_types(port: int, rng: random.Random) -> int:
    field = rng.choice(("messages", "max_tokens", "temperature", "stop", "logit_bias", "response_format"))
    value = rng.choice(([[]], {"a": {}}, -7, "\ud800", [None], 1e308, True))
    return request(port, "POST", _CHAT, _body(rng) | {field: value})[0]


def wrong_key(port: int, rng: random.Random) -> int:
    key = rng.choice((None, "x" * 30, KEYS[0][:-1], KEYS[0].upper(), "\x7f" * 9000))
    return request(port, rng.choice(("GET", "POST")), rng.choice(("/v1/models", "/v1/stats")), key=key)[0]


def nowhere(port: int, rng: random.Random) -> int:
    path = rng.choice(
        ("/v2", "/v1/context/..%2f..%2fetc", "/%00", "/v1/context/" + "a" * 3000, "/v1/models/x")
    )
    return request(port, rng.choice(("GET", "DELETE", "PUT")), path)[0]


def no_http(port: int, rng: random.Random) -> int:
    head = rng.choice(("hello\n", "\x16\x03\x01\x02", "GET / HTTP/9.9\n", "GET /" + "a" * 70_000))
    with _send(port, head) as connection, suppress(TimeoutError, ConnectionResetError):
        connection.settimeout(0.5)
        connection.recv(100)
    return 0


def looks(port: int, rng: random.Random) -> int:
    return request(port, "GET", rng.choice(("/", "/health", "/metrics", "/v1/stats", "/openapi.json")))[0]


MODEL = "soak"
_MANY = [(whole, _BUSY), (streamed, _BUSY), (leaves_while_waiting, (0,)), (leaves_while_reading, (0,))]
WAYS: list[tuple[Callable[[int, random.Random], int], tuple[Any, ...]]] = [
    *(_MANY * 3),
    (leaves_while_sending, (0,)),
    (leaves_while_making_a_session, (0,)),
    (session, (201, 429, 504)),
    (too_large, (413,)),
    (too_large_in_chunks, (413, 429, "BrokenPipeError", "ConnectionResetError")),
    (bad_json, (400,)),
    (unknown_fields, _BUSY),
    (wrong_types, (400, *_BUSY)),
    (wrong_key, (401, 405, 431)),
    (nowhere, (400, 404, 405)),
    (no_http, (0,)),
    (looks, (200,)),
]
