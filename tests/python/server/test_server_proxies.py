"""The blocks for nginx and Caddy on the page of clients, run: streams come through as they are made."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.patience import PATIENCE, wait_for
from support.servers.certificates import Authority
from support.servers.server import Server, running

pytestmark = pytest.mark.full

PAGE = (Path(__file__).parents[3] / "docs/clients.md").read_text()
KEY = "a-key-0123456789abcdef"
HOST = "llm.example.org"


def block(title: str, server: Server) -> str:
    found = re.search(rf"### {title}\n.*?```\w*\n(.*?)```", PAGE, re.S)
    assert found
    return found[1].replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")


def nginx(folder: Path, server: Server, port: int) -> list[str]:
    pair = Authority(folder).sign("llm")
    text = block("nginx", server).replace("443", str(port))
    text = text.replace("/etc/ssl/llm.pem", str(pair.cert)).replace("/etc/ssl/llm.key", str(pair.key))
    (folder / "conf").write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/log; events {{}} http {{ access_log off; {text} }}"
    )
    return ["nginx", "-e", str(folder / "log"), "-c", str(folder / "conf")]


def caddy(folder: Path, server: Server, port: int) -> list[str]:
    text = block("Caddy", server).replace(f"{HOST} {{", f"{HOST}:{port} {{\n tls internal")
    general = [
        "admin off",
        "auto_https disable_redirects",
        "skip_install_trust",
        f"storage file_system {folder}",
    ]
    (folder / "Caddyfile").write_text("\n ".join(["{", *general]) + f"\n}}\n{text}")
    return ["caddy", "run", "--config", str(folder / "Caddyfile")]


def connect(port: int) -> http.client.HTTPConnection:
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(HOST, timeout=PATIENCE)
    sock = socket.create_connection(("127.0.0.1", port), PATIENCE)
    connection.sock = tls.wrap_socket(sock, server_hostname=HOST)
    return connection


def is_up(port: int) -> bool:
    try:
        connect(port).close()
    except OSError:
        return False
    return True


@contextmanager
def proxied(make: Callable[[Path, Server, int], list[str]], folder: Path, server: Server) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen(make(folder, server, port), stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: is_up(port))
            yield port
        finally:
            process.terminate()


@pytest.mark.parametrize("make", [nginx, caddy])
def test_a_stream_behind_a_proxy(make: Callable[[Path, Server, int], list[str]], tmp_path: Path) -> None:
    if shutil.which(make.__name__) is None:
        pytest.skip(f"{make.__name__} is not installed")
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    body = {"prompt": "Once", "max_tokens": 60_000, "stream": True, "ignore_eos": True}
    with running("--n-ctx", "65536", "--api-key", KEY) as server, proxied(make, tmp_path, server) as port:
        connection = connect(port)
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: ")

        def n_running() -> int:
            return int(server.request("GET", "/v1/stats", key=KEY)[1]["requests"]["running"])

        assert n_running() == 1  # which has minutes to go
        answer.close()
        connection.close()
        wait_for(lambda: n_running() == 0)
        body = {"prompt": "x" * 7_000_000, "max_tokens": 1}  # more than a proxy's usual megabyte
        connection = connect(port)
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        assert b"shorten it" in connection.getresponse().read()
