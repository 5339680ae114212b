"""Connections that hold places, or hide a request in a body: who has a key is answered, and nobody else."""

from __future__ import annotations

import re
import resource
import shutil
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from mixedkv.bundled import model_path
from mixedkv_server.http.places import ConnectionPlace, Places, Stage, address_of
from support.clients.raw_http import KEYS, SHORT, answer, connected, is_closed, post
from support.patience import wait_for
from support.servers.certificates import Authority
from support.servers.server import Server, key_file, running

pytestmark = pytest.mark.full

ANNA, BEN = KEYS
SMALL = ("--n-ctx", "512", "--parallel", "2")


# --- who gives way ---


class Asked:
    """Places, and the names of connections that were ended."""

    def __init__(self, limit: int) -> None:
        self.places, self.ended, self.now = Places(limit), [], 0.0
        self.ended: list[str]

    def enter(
        self, name: str, address: str = "10.0.0.1", tenant: str = "", at: Stage | None = None
    ) -> ConnectionPlace:
        """A new connection; of a tenant that was let in if it names one, or works."""
        self.now += 1
        place = self.places.enter(address, lambda: self.ended.append(name), self.now)
        assert place is not None, name
        if at is not None:
            place.move(at, self.now)
            assert place.let_in(tenant)
        return place


def test_a_stranger_gives_way_and_an_owner_does_not() -> None:
    asked = Asked(3)
    asked.enter("anna", tenant="anna", at=Stage.BODY)
    for i in range(100):
        asked.enter(f"stranger {i}")
    assert asked.ended == [f"stranger {i}" for i in range(36)]  # 64 may be there beside owners
    for i in range(30):
        asked.enter(f"ben {i}", tenant="ben", at=Stage.ANSWER)
    assert asked.ended == [f"stranger {i}" for i in range(len(asked.ended))]


def test_the_address_with_most_strangers_gives_way() -> None:
    asked = Asked(4)
    asked.enter("honest", address="10.0.0.2")
    for i in range(100):
        asked.enter(f"stranger {i}")
    assert asked.ended[0] == "stranger 0"
    assert "honest" not in asked.ended


def test_then_idle_connections_of_who_has_most() -> None:
    asked = Asked(4)
    asked.enter("ben", tenant="ben", at=Stage.IDLE)
    for i in range(3):
        asked.enter(f"anna {i}", tenant="anna", at=Stage.IDLE)
    asked.enter("new")
    assert asked.ended == ["anna 0"]


def test_who_has_fewer_connections_takes_a_place_of_who_has_most() -> None:
    asked = Asked(4)
    for i in range(4):
        asked.enter(f"anna {i}", tenant="anna", at=Stage.BODY if i == 2 else Stage.ANSWER)
    more = asked.enter("more")
    assert not more.let_in("anna")
    assert more.is_beyond
    ben = asked.enter("ben")
    assert ben.let_in("ben")
    assert not ben.is_beyond
    assert "anna 2" in asked.ended
    assert asked.enter("ben again").let_in("ben")  # there is nothing left to take, and still fewer than anna


def test_places_beyond_the_limit_have_an_end() -> None:
    asked = Asked(1)
    asked.enter("anna", tenant="anna", at=Stage.ANSWER)
    for i in range(200):
        asked.enter(f"stranger {i}")
    assert 10 < len(asked.places) < 100


def test_without_keys_an_address_is_an_owner() -> None:
    asked = Asked(2)
    asked.enter("a", address="10.0.0.1", at=Stage.BODY)
    asked.enter("b", address="10.0.0.1", at=Stage.BODY)
    assert not asked.places.enter("10.0.0.1", lambda: None, 9.0).let_in("")  # type: ignore[union-attr]
    assert asked.places.enter("10.0.0.2", lambda: None, 9.0).let_in("")  # type: ignore[union-attr]
    assert asked.ended == ["a"]


def test_an_address_is_what_one_client_has() -> None:
    assert address_of(("10.0.0.1", 5)) == address_of(("::ffff:10.0.0.1", 5, 0, 0)) == "10.0.0.1"
    assert address_of(("2001:db8::1", 5, 0, 0)) == address_of(("2001:db8::2%eth0", 5, 0, 0))
    assert address_of(("2001:db8::1", 5, 0, 0)) != address_of(("2001:db8:0:1::1", 5, 0, 0))
    assert address_of("") == address_of(None) == ""


# --- who holds places ---


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    lines = (f"anna:{ANNA}", f"ben:{BEN}")
    return "--api-key-file", str(key_file(tmp_path_factory.mktemp("keys"), *lines))


@contextmanager
def opened(n: int, server: Server, data: bytes = b"") -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(connected(server, data)) for _ in range(n)]


def seconds_to_answer(server: Server) -> float:
    began = time.monotonic()
    assert server.status("POST", "/v1/completions", SHORT, key=ANNA) == 200
    return time.monotonic() - began


@pytest.fixture(scope="module")
def narrow(keys: tuple[str, str]) -> Iterator[Server]:
    with running(*SMALL, *keys, "--max-connections", "16") as server:
        yield server


@pytest.mark.parametrize("path", ["/health", "/", "/metrics", "/openapi.json", "/page/chat.js", "/v1/models"])
def test_slow_bodies_of_strangers_hold_no_places(narrow: Server, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000\r\n\r\n{{".encode()
    with opened(21, narrow, head):
        for _ in range(3):
            assert seconds_to_answer(narrow) < 5


def test_an_open_path_is_answered_without_its_body(narrow: Server) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000\r\n\r\n{"
    with connected(narrow, head) as connection:
        assert answer(connection)[0] == 200
        assert is_closed(connection)


@pytest.mark.parametrize("n_files", [288, pytest.param(1024, marks=pytest.mark.nightly)])
def test_handshakes_that_never_begin_hold_no_places(
    keys: tuple[str, str], tmp_path: Path, n_files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the process may open, and however many connections it may have."""
    one = Authority(tmp_path).sign("server")
    few = ["--max-connections", "32"] if n_files == 288 else []
    options = [*SMALL, *keys, *few, "--tls-cert", str(one.cert), "--tls-key", str(one.key)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("this machine lets a process open few files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    own = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({n_files}, {n_files}))"
    program = (
        "-c",
        f"{own}\nimport sys\nfrom mixedkv.cli import main\nsys.exit(main(['serve', *sys.argv[1:]]))",
    )
    server = Server(*options, program=program)
    server.tls = ssl._create_unverified_context()
    try:
        server.wait_until_ready()
        with opened(n_files + 120, server):
            for _ in range(3):
                assert seconds_to_answer(server) < 5
        assert "Too many open files" not in server.log
    finally:
        server.stop(9)


def test_a_handshake_has_its_time(keys: tuple[str, str], tmp_path: Path) -> None:
    one = Authority(tmp_path).sign("server")
    options = [*SMALL, *keys, "--read-timeout", "1", "--tls-cert", str(one.cert), "--tls-key", str(one.key)]
    server = Server(*options)
    server.tls = ssl._create_unverified_context()
    try:
        server.wait_until_ready()
        with opened(1, server) as silent, opened(1, server, b"\x16\x03\x01\x02") as half:
            for connection in (*silent, *half):
                connection.settimeout(8)
                assert is_closed(connection)
        assert server.status("GET", "/health") == 200
        assert server.stop() == 0
        assert "Traceback" not in server.log
    finally:
        server.stop(9)


def test_a_tenant_with_all_places_leaves_some_to_others(narrow: Server) -> None:
    """ANNA's 16 bodies never end; BEN has none, and is answered."""
    slow = post(b"x" * 100, f"Authorization: Bearer {ANNA}")[:-50]
    with opened(16, narrow, slow) as held:
        wait_for(lambda: narrow.status("GET", "/v1/models", key=ANNA) == 503)
        for _ in range(3):
            assert narrow.status("POST", "/v1/completions", SHORT, key=BEN) == 200
        status, body = answer(held[0])
        assert (status, body["error"]["code"]) == (503, "too_many_connections")


# --- what hides in a body ---

HOST, KEY = b"Host: localhost\r\n", f"Authorization: Bearer {ANNA}\r\n".encode()
INNER = b"GET /v1/models HTTP/1.1\r\n" + HOST + KEY + b"\r\n"
LENGTH = b"Content-Length: %d\r\n" % (len(INNER) + 5)
AMBIGUOUS = {
    "both": LENGTH + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "both, the other way round": b"Transfer-Encoding: chunked\r\n" + LENGTH + b"\r\n0\r\n\r\n",
    "both, folded": LENGTH + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "both, in capitals": LENGTH + b"TRANSFER-ENCODING: Chunked\r\n\r\n0\r\n\r\n",
    "both, a space before the colon": LENGTH + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "two codings": b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "a coding twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "another coding": b"Transfer-Encoding: identity\r\n\r\n",
    "two lengths": b"Content-Length: 0\r\n" + LENGTH + b"\r\n0\r\n\r\n",
    "two lengths in one": b"Content-Length: 0, %d\r\n\r\n0\r\n\r\n" % (len(INNER) + 5),
    "a length with a sign": b"Content-Length: +0\r\n\r\n",
    "a bare LF in a chunk": b"Transfer-Encoding: chunked\r\n\r\n0\n\n",
    "a chunk that is longer": b"Transfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n",
    "a chunk's size with a sign": b"Transfer-Encoding: chunked\r\n\r\n-0\r\n\r\n",
}


@pytest.fixture(scope="module", params=["one model", "no keys", "router"])
def door(
    request: pytest.FixtureRequest, keys: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    options = list(SMALL) + list(() if request.param == "no keys" else keys)
    if request.param == "router":
        copy = shutil.copy(model_path(), tmp_path_factory.mktemp("models") / "one.gguf")
        options += ["-m", str(copy), "--keep-alive", "5m"]
    with running(*options) as server:
        yield server


def statuses(server: Server, data: bytes, seconds: float = 20) -> tuple[list[bytes], bool]:
    """Of all answers on a connection, and whether it was closed behind them."""
    with connected(server, data) as connection:
        connection.settimeout(seconds)
        got = b""
        try:
            while more := connection.recv(65536):
                got += more
        except TimeoutError:
            return re.findall(rb"HTTP/1\.1 (\d{3})", got), False
        except ConnectionError:
            pass
        return re.findall(rb"HTTP/1\.1 (\d{3})", got), True


@pytest.mark.parametrize("name", AMBIGUOUS)
@pytest.mark.parametrize(
    "who", [KEY, b"", b"Origin: http://evil.example\r\n"], ids=["key", "stranger", "other site"]
)
def test_a_length_that_can_be_read_in_two_ways_is_refused(door: Server, who: bytes, name: str) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\n" + HOST + who
    found, closed = statuses(door, head + AMBIGUOUS[name] + INNER)
    assert closed
    assert found in ([b"400"], [b"501"]), found


def test_transfer_encoding_is_of_http_1_1(door: Server) -> None:
    head = b"POST /v1/completions HTTP/1.0\r\n" + HOST + KEY + b"Transfer-Encoding: chunked\r\n\r\n"
    assert statuses(door, head + b"0\r\n\r\n" + INNER) == ([b"400"], True)


@pytest.mark.parametrize("who", [b"", KEY], ids=["stranger", "key"])
@pytest.mark.parametrize(
    "more",
    [
        b"Expect: 100-continue\r\n",
        b"Upgrade: h2c\r\nConnection: Upgrade\r\n",
        b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n",
    ],
)
def test_nothing_runs_behind_an_error_whose_body_is_unread(door: Server, who: bytes, more: bytes) -> None:
    """A body that is too large, or has no key, is not read to its end."""
    head = b"POST /v1/completions HTTP/1.1\r\n" + HOST + who + more + b"Content-Length: 90000000\r\n\r\n"
    found, closed = statuses(door, head + INNER)
    assert closed
    assert found in ([b"401"], [b"413"]), found


def test_a_body_that_was_read_keeps_its_connection(door: Server) -> None:
    """Who sends a wrong key, or asks for what is not there, can go on."""
    whole = post(SHORT, "Content-Type: application/json", path="/v1/nothing")
    found, _ = statuses(door, whole + INNER, 1)
    assert found[1:] == [b"200"]
    assert found[0] in (b"401", b"404")
