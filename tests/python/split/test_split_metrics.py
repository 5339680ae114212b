"""The port for Prometheus: open to who reaches it, and held up by nobody."""

from __future__ import annotations

import asyncio
import http.client
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter

from mixedkv_split.metrics_door import serve_metrics
from support.patience import PATIENCE

pytestmark = pytest.mark.full


def served(client: Callable[[int], Any]) -> Any:
    """What a client returns, which is given the port."""
    registry = CollectorRegistry()
    Counter("lamps", "Lamps.", registry=registry).inc(3)

    async def run() -> Any:
        async with serve_metrics("127.0.0.1", 0, registry) as port:
            return await asyncio.to_thread(client, port)

    return asyncio.run(run())


def ask(port: int, method: str = "GET", body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request(method, "/metrics", body)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_it_has_the_numbers() -> None:
    status, body = served(ask)
    assert (status, b"lamps_total 3.0" in body) == (200, True)
    assert served(lambda port: ask(port, "HEAD")) == (200, b"")
    assert served(lambda port: ask(port, "POST", b"x"))[0] == 405


@pytest.mark.parametrize("data", [b"", b"GET /metrics HTTP/1.1\r\nX: "])
def test_clients_that_never_finish_hold_nobody_up(data: bytes) -> None:
    def client(port: int) -> float:
        held = [socket.create_connection(("127.0.0.1", port), PATIENCE) for _ in range(60)]
        for each in held:
            each.sendall(data)
        began = time.monotonic()
        assert all(ask(port)[0] == 200 for _ in range(3))
        seconds = time.monotonic() - began
        for each in held:
            each.close()
        return seconds

    assert served(client) < 4


def test_a_request_has_its_time() -> None:
    def client(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as held:
            held.sendall(b"GET ")
            try:
                return held.recv(100)
            except ConnectionError:
                return b""

    assert served(client) == b""


def test_a_head_that_is_too_large_is_given_up() -> None:
    def client(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as held:
            try:
                held.sendall(b"GET /" + b"a" * 100_000)
                return held.recv(100)
            except ConnectionError:
                return b""

    assert served(client) == b""
