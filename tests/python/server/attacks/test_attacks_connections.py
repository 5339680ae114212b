"""Clients that never finish: heads, bodies and answers that take for ever."""

from __future__ import annotations

import select
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.clients.raw_http import KEYS, answer, connected, is_closed, post, send
from support.patience import wait_for
from support.servers.server import Server, running

pytestmark = pytest.mark.nightly


def test_a_body_that_never_ends_is_408(hasty: Server) -> None:
    with connected(hasty, post(b"x" * 100)[:-50]) as connection:
        status, body = answer(connection)
        assert (status, body["error"]["type"]) == (408, "timeout_error")
        assert is_closed(connection)


@pytest.mark.parametrize("begin", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\n"])
def test_a_head_that_never_ends_is_given_up(hasty: Server, begin: bytes) -> None:
    with connected(hasty, begin) as connection:
        assert answer(connection)[0] == 408
        assert is_closed(connection)


def test_a_second_head_that_never_ends_is_given_up(hasty: Server) -> None:
    """The first byte of the next request ends uvicorn's own limit."""
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connected(hasty, whole) as connection:
        assert answer(connection)[0] == 200
        connection.sendall(b"G")
        assert answer(connection)[0] == 408


def test_dripping_a_head_wins_no_time(hasty: Server) -> None:
    with connected(hasty, b"GET /health HTTP/1.1\r\nHost: localhost\r\n") as connection:

        def is_refused() -> bool:
            try:
                connection.sendall(b"X-A: b\r\n")
            except ConnectionError:
                return True
            return False

        wait_for(is_refused, pause=0.1)


def test_an_answer_may_take_longer_than_its_request(hasty: Server) -> None:
    """The limit is on sending, not on waiting."""
    body = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "use_kv_cache": False}
    with connected(hasty, post(body, "Content-Type: application/json")) as connection:
        status, whole = answer(connection)
        assert status == 200
        assert whole["usage"]["completion_tokens"] > 500


def test_many_idle_connections_do_not_lock_others_out() -> None:
    options = ("--n-ctx", "256", "--parallel", "1", "--max-connections", "20", "--read-timeout", "1000")
    with running(*options) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
        for path in ("/health", "/v1/models", "/metrics"):
            assert server.status("GET", path) == 200
        assert is_closed(idle[0])  # the idlest made room
        for connection in idle:
            connection.close()


def test_connections_at_work_leave_some_for_health() -> None:
    options = ("--n-ctx", "2048", "--parallel", "1", "--max-connections", "8", "--read-timeout", "1000")
    with running(*options) as server, ExitStack() as stack:
        head = post(b"x" * 100, "Expect: 100-continue")[:-100]  # the body never comes
        busy = [stack.enter_context(connected(server, head)) for _ in range(8)]
        assert all(b"100 Continue" in connection.recv(1000) for connection in busy)  # at work

        def asked(path: str) -> tuple[int, Any, dict[str, str]]:
            """Again where this thread is held up: such a connection has a second for its request."""
            while (found := server.request("GET", path))[0] == 408:
                pass
            return found

        status, body, headers = asked("/v1/models")
        assert (status, body["error"]["code"]) == (503, "too_many_connections")
        assert int(headers["retry-after"]) >= 1
        with connected(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as connection:
            assert answer(connection)[0] == 200
            assert is_closed(connection)  # the place is free for the next one
        assert asked("/metrics")[0] == asked("/ready")[0] == 200
        assert not readable(busy)
        busy[0].close()
        wait_for(lambda: server.status("GET", "/v1/models") == 200)


def test_who_never_reads_is_given_up() -> None:
    """Else what waits for him would wait for ever, and his connection with it."""
    options = ("--n-ctx", "4096", "--parallel", "2", "--request-timeout", "2", "--max-body-mb", "4")
    with running(*options) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        ask = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
        wait_for(lambda: open_connections(server) == 1)  # no other one is left
        began = time.monotonic()
        connection.sendall(ask * 400)
        wait_for(lambda: open_connections(server) == 0)
        assert time.monotonic() - began >= 2  # not sooner
        connection.close()


def open_connections(server: Server) -> int:
    """Sockets of the server's process that are connected."""
    port = f"{server.port:04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[1].endswith(":" + port) and line.split()[3] == "01" for line in lines)


def test_many_large_bodies_are_not_held_at_a_time(keyed: Server) -> None:
    key = f"Authorization: Bearer {KEYS[0]}"
    with ExitStack() as stack:
        part = post(b" " * 900_000, key)[:-1]
        connections = [stack.enter_context(connected(keyed, part)) for _ in range(20)]
        assert send(keyed, post(b" " * 60_000, key))[0] == 400  # small ones are taken all the same
        wait_for(lambda: len(readable(connections)) >= 12)
        answers = [answer(connection)[0] for connection in readable(connections)]
        assert answers == [429] * 12  # 9 are more bytes than 8 of the largest size
    wait_for(lambda: send(keyed, post(b" " * 900_000, key))[0] == 400)  # all is given back


def test_lengths_that_are_only_said_hold_nothing(keyed: Server) -> None:
    """17 heads of large bodies without a byte of them: what others send is taken."""
    key = f"Authorization: Bearer {KEYS[0]}"
    with ExitStack() as stack:
        whole = post(b" " * 999_000, key)
        head = whole[: whole.index(b"\r\n\r\n") + 4]
        for _ in range(17):
            stack.enter_context(connected(keyed, head))
        assert send(keyed, post(b" " * 900_000, key))[0] == 400


def readable(connections: list[socket.socket]) -> list[socket.socket]:
    """Those that have been sent something."""
    return select.select(connections, (), (), 0)[0]


def test_large_bodies_that_never_end_are_given_up(hasty: Server) -> None:
    with ExitStack() as stack:
        part = post(b" " * 900_000)[:-1]
        connections = [stack.enter_context(connected(hasty, part)) for _ in range(8)]
        assert [answer(connection)[0] for connection in connections] == [408] * 8
    wait_for(lambda: send(hasty, post(b" " * 900_000))[0] == 400)  # all is given back


def test_tiny_chunks_hold_nobody_up(keyed: Server) -> None:
    """h11 takes some 40 microseconds for each: with 256 KiB read at a time others are answered once or
    twice meanwhile, with 8 KiB 15 times and more.
    """
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    key = f"Authorization: Bearer {KEYS[0]}\r\n\r\n".encode()
    data = head + key + b"1\r\na\r\n" * 150_000 + b"0\r\n\r\n"

    def others_are_answered() -> bool:
        """Unless this thread did not come to ask."""
        with ThreadPoolExecutor(1) as pool:
            sending, n_others = pool.submit(send, keyed, data), 0
            while not sending.done():
                assert keyed.status("GET", "/health") == 200
                n_others += 1
        assert sending.result()[0] == 400
        return n_others >= 6

    wait_for(others_are_answered)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET / HTTP/1.1\r\n\r\n",  # no host
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /none HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
        b"POST /v1/warm HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_not_http_is_refused_in_openais_form_and_not_logged(server: Server, data: bytes) -> None:
    before = len(server.log)
    status, body = send(server, data)
    assert status in (400, 404, 501)
    assert body["error"]["message"]
    assert server.log[before:] == ""
