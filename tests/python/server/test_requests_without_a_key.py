"""Who has no key learns nothing else from a server that wants one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.servers.server import Server, key_file, running

pytestmark = pytest.mark.full

KEY = "anna-key-0123456789"
OPEN = {"/", "/stats", "/docs", "/page/{name}", "/health", "/ready", "/metrics", "/openapi.json"}
BODIES: list[bytes] = [b"", b"{", b"[]", b'{"prompt": 5, "what": 1}', b"{" + b" " * 100_000]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys: Path = key_file(tmp_path_factory.mktemp("keys"), f"anna:{KEY}")
    with running("--n-ctx", "1024", "--embeddings", "--api-key-file", str(keys)) as server:
        yield server


def routes(server: Server) -> list[tuple[str, str]]:
    paths: dict[str, Any] = server.request("GET", "/openapi.json")[1]["paths"]
    return [(method.upper(), path) for path, methods in paths.items() for method in methods]


def test_a_stranger_is_refused_whatever_else_is_wrong(server: Server) -> None:
    found = [(method, path) for method, path in routes(server) if path not in OPEN]
    assert len(found) >= 30
    for method, path in found:
        where = path.replace("{", "").replace("}", "!")  # also an id that no route takes
        for key in ("", "a-wrong-key-0123456789"):
            for body in BODIES if method == "POST" else [b""]:
                assert server.status(method, where, raw=body or None, key=key) == 401, (method, path, body)
    assert server.status("GET", "/v1/nothing") == 401
    assert server.status("GET", "/v1/nothing", key=KEY) == 404


def test_what_is_open_stays_open(server: Server) -> None:
    for path in OPEN:
        assert server.status("GET", path.replace("{name}", "chat.js")) == 200, path


def test_head_is_answered_wherever_get_is(server: Server) -> None:
    gets = [path for method, path in routes(server) if method == "GET"]
    for path in [*gets, "/", "/stats", "/page/chat.js", "/openapi.json"]:
        where = path.replace("{", "").replace("}", "")
        status, body, _ = server.request("HEAD", where, key=KEY)
        assert status == server.status("GET", where, key=KEY), path
        assert not body
