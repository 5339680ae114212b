"""Tenants of a real server: what one asks for does not keep others from their share."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from support.patience import PATIENCE, wait_for
from support.servers.server import Server, key_file, running

pytestmark = pytest.mark.full

NAMES = ("anna", "ben", "cleo", "dora", "metrics")
ANNA, BEN, CLEO, DORA, METRICS = (f"{name}-key-0123456789" for name in NAMES)


class Stream:
    """A streamed request that a thread reads."""

    def __init__(self, server: Server, key: str, n: int, max_tokens: int) -> None:
        body = {"prompt": "x", "n": n, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with suppress(OSError, http.client.HTTPException):  # `stop`
            self._connection.getresponse().read()
        self._connection.close()

    def stop(self) -> None:
        if self._connection.sock is not None:
            with suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE)


@contextmanager
def streams(server: Server, *asked: tuple[str, int, int]) -> Iterator[list[Stream]]:
    opened: list[Stream] = []
    try:
        for key, n, max_tokens in asked:
            opened.append(Stream(server, key, n, max_tokens))
        yield opened
    finally:
        for stream in opened:
            stream.stop()
        server.wait_until_idle(ANNA)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    lines = (f"anna:{ANNA}", f"ben:{BEN} weight=3", f"cleo:{CLEO}", f"dora:{DORA} running=1 queued=1")
    keys = key_file(tmp_path_factory.mktemp("keys"), *lines)
    metrics_key = key_file(tmp_path_factory.mktemp("metrics"), METRICS)
    options = ("--api-key-file", str(keys), "--metrics-key-file", str(metrics_key))
    with running("--n-ctx", "65536", "--parallel", "4", *options) as server:
        yield server


def generated(server: Server) -> Counter[str]:
    """Tokens of each tenant's answers at one moment, whatever has been read of them."""
    line = r'^mixedkv_tenant_generation_tokens_total{tenant="(\w+)"} (\S+)$'
    found = re.findall(line, server.metrics(METRICS), re.M)
    return Counter({tenant: int(float(n)) for tenant, n in found})


def test_64_endless_answers_leave_a_place_to_another_tenant(server: Server) -> None:
    """With four places at least every fourth token is the other's."""
    with streams(server, (ANNA, 64, 3000)) as opened:
        before = generated(server)
        wait_for(lambda: generated(server)["anna"] - before["anna"] > 100)
        opened.append(Stream(server, CLEO, 1, 20_000))
        began = until(server, "cleo", before["cleo"] + 20)
        n = until(server, "cleo", before["cleo"] + 200) - began
        assert n["anna"] <= 3 * n["cleo"] * 1.25 + 50
        assert server.stats(ANNA)["requests"]["waiting"] > 50  # all that was asked for is still there


def test_a_full_queue_of_one_tenant_is_not_anothers(server: Server) -> None:
    asked = [(ANNA, 64, 3000), (ANNA, 4, 3000)]
    with streams(server, *asked):
        wait_for(lambda: server.stats(ANNA)["requests"]["waiting"] == 64)
        body = {"prompt": "y", "max_tokens": 2}
        assert server.status("POST", "/v1/completions", {**body, "n": 64}, key=ANNA) == 429
        assert server.status("POST", "/v1/completions", body, key=CLEO) == 200


def test_tokens_go_by_weight(server: Server) -> None:
    before = generated(server)
    with streams(server, (ANNA, 16, 3000), (BEN, 16, 3000)):
        wait_for(lambda: min((generated(server) - before)[tenant] for tenant in ("anna", "ben")) > 50)
        began = generated(server)
        n = until(server, "ben", began["ben"] + 1000) - began
    assert n["ben"] / n["anna"] == pytest.approx(3, rel=0.1)


def until(server: Server, tenant: str, n: int) -> Counter[str]:
    """What is generated when a tenant has so many tokens."""
    now: Counter[str] = Counter()

    def are_there() -> bool:
        now.update(generated(server) - now)
        return now[tenant] >= n

    wait_for(are_there)
    return now


def test_sighup_reads_keys_and_limits_again(tmp_path: Path) -> None:
    body = {"prompt": "x", "max_tokens": 1, "n": 3}
    options = ("--n-ctx", "1024", "--parallel", "2", "--max-queue", "8")
    with running(*options, "--api-key-file", str(key_file(tmp_path, f"anna:{ANNA}"))) as server:
        assert server.status("POST", "/v1/completions", body, key=ANNA) == 200
        key_file(tmp_path, f"anna:{ANNA} running=1 queued=1", f"ben:{BEN}")
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: server.status("POST", "/v1/completions", body, key=BEN) == 200)
        assert server.status("POST", "/v1/completions", body, key=ANNA) == 400
        key_file(tmp_path, f"ben:{BEN} weight=0")
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "line 1: weight" in server.log)
        assert server.status("POST", "/v1/completions", {**body, "n": 2}, key=ANNA) == 200
        assert server.stop() == 0
    assert BEN not in server.log


def test_what_is_being_prepared_counts_as_waiting(server: Server) -> None:
    """DORA may have one request running and one waiting; the rest of twelve is refused while the first are
    being compiled.
    """

    def ask(i: int) -> int:
        strings = {f"p{i}_{j}": {"type": "string", "pattern": "^[a-z]{1,50}$"} for j in range(400)}
        schema = {"name": "x", "schema": {"type": "object", "properties": strings}}
        form = {"type": "json_schema", "json_schema": schema}
        message = {"role": "user", "content": "x"}
        body = {"messages": [message], "max_tokens": 1, "response_format": form}
        return server.status("POST", "/v1/chat/completions", body, key=DORA)

    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(ask, i) for i in range(12)]
        body = {"prompt": "x", "max_tokens": 1}
        assert server.status("POST", "/v1/completions", body, key=ANNA) == 200
        seen = Counter(each.result() for each in asked)
    assert seen.keys() == {200, 429}
    assert seen[429] >= 2
    server.wait_until_idle(ANNA)


def test_unfinished_bodies_of_one_tenant_are_not_anothers(server: Server) -> None:
    """ANNA sends eleven bodies of 8 MB that never end; BEN's of 1 MB is taken."""
    sockets = []
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ANNA}\r\n"
        for _ in range(11):
            sock = socket.create_connection(("127.0.0.1", server.port), PATIENCE)
            sockets.append(sock)
            with suppress(OSError):  # a refused one
                sock.sendall(f"{head}Content-Length: 8000000\r\n\r\n".encode() + b" " * 7_900_000)
        large = b'{"prompt": "x", "max_tokens": 1}' + b" " * 1_000_000
        assert server.status("POST", "/v1/completions", raw=large, key=BEN) == 200
    finally:
        for sock in sockets:
            sock.close()
