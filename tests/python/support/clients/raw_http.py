"""HTTP as bytes: what no client library would send."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.patience import PATIENCE
from support.servers.server import Server

CHAT = [{"role": "user", "content": "x"}]
KEYS = ("anna-key-0123456789", "ben-key-01234567890")
SHORT = {"prompt": "x", "max_tokens": 1}


@contextmanager
def connected(server: Server, data: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(data)
        yield connection


def post(body: Any, *headers: str, host: str = "localhost", path: str = "/v1/completions") -> bytes:
    """A request as bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + data


def answer(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and body of an answer after which the connection is closed, or the server waits."""
    data = b""
    while not _is_whole(data):
        more = connection.recv(65536)
        if not more:
            break
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def _is_whole(data: bytes) -> bool:
    head, end, body = data.partition(b"\r\n\r\n")
    length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(end and length) and len(body) >= int(length[0].split(b":")[1])


def send(server: Server, data: bytes) -> tuple[int, dict[str, Any]]:
    with connected(server, data) as connection:
        return answer(connection)


def is_closed(connection: socket.socket) -> bool:
    """Whether the server closes the connection before the socket's timeout."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True
