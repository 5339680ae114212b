"""What a client sends and leaves is not paid for by others."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.servers.server import Server, children, key_file, running

pytestmark = pytest.mark.full

ANNA, MALLORY = "anna-key-0123456789", "mallory-key-01234567"
LARGE = {"prompt": "hello " * 12_000, "max_tokens": 1, "overflow": "slide"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = key_file(tmp_path_factory.mktemp("keys"), f"anna:{ANNA}", f"mallory:{MALLORY}")
    with running("--n-ctx", "2048", "--parallel", "2", "--api-key-file", str(keys)) as server:
        yield server


def processor_seconds(server: Server) -> float:
    """What the server and its processes have used."""
    used = 0
    for pid in (server.process.pid, *children(server.process.pid)):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        used += int(fields[11]) + int(fields[12])
    return used / 100


def leave(server: Server, body: dict[str, Any], seconds: float) -> None:
    """Ask, and close the connection before the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=seconds)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {MALLORY}"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    with pytest.raises(TimeoutError):
        connection.getresponse()
    connection.close()


def test_a_text_of_a_client_that_left_is_not_tokenized_further(server: Server) -> None:
    """7 MB of one word held the thread for large bodies for minutes, and 1 GB of memory."""
    server.post("/v1/completions", LARGE, key=ANNA)
    leave(server, {"prompt": "a" * 7_000_000, "max_tokens": 1, "overflow": "slide"}, 3)
    server.post("/v1/completions", LARGE, key=ANNA)
    used = processor_seconds(server)
    time.sleep(2)
    assert processor_seconds(server) - used < 1


def test_large_bodies_of_one_tenant_leave_room_to_others(server: Server) -> None:
    connections = []
    for _ in range(3):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {MALLORY}"}
        body = {"prompt": "a" * 7_000_000, "max_tokens": 1, "overflow": "slide"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        connections.append(connection)
    assert server.post("/v1/completions", LARGE, key=ANNA)["usage"]["completion_tokens"] == 1
    for connection in connections:
        connection.close()
    assert server.post("/v1/completions", LARGE, key=MALLORY)["usage"]["completion_tokens"] == 1
