"""Adversaries: pages of other sites, clients that never finish, names and texts that are traps."""

from __future__ import annotations

import json
import random
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.bundled.corpus import make_recall
from mixedkv.engine.tokenizer import Tokenizer
from support.patience import PATIENCE, wait_for
from support.server_support import MODEL, Server, key_file, running

CHAT = [{"role": "user", "content": "x"}]
KEYS = ("anna-key-0123456789", "ben-key-01234567890")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--n-ctx", "1024", "--parallel", "2", "--max-body-mb", "1", "--read-timeout", "1") as server:
        yield server


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with keys that gives a request all the time it needs."""
    keys = key_file(tmp_path_factory.mktemp("keys"), f"anna:{KEYS[0]}", f"ben:{KEYS[1]}")
    options = ("--n-ctx", "1024", "--parallel", "2", "--max-body-mb", "1", "--read-timeout", "1000")
    with running(*options, "--api-key-file", str(keys)) as server:
        yield server


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


# --- pages of other sites ---

SHORT = {"prompt": "x", "max_tokens": 1}


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000"])
def test_this_machine_may_be_called_by_its_names(server: Server, host: str) -> None:
    assert send(server, post(SHORT, "Content-Type: application/json", host=host))[0] == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io:80", "0.0.0.0", "x@y", "[::1", "10.0.0.1"],
)
def test_a_name_bound_to_this_machine_is_refused(server: Server, host: str) -> None:
    """DNS rebinding: to the browser evil.example is then the server itself."""
    for path in ("/v1/completions", "/v1/stats"):
        status, body = send(server, post(SHORT, host=host, path=path))
        assert (status, body["error"]["code"]) == (403, "host_not_allowed")
        assert "api_key_file" in body["error"]["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/json", "", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:1", "http://localhost.evil.example"]
)
def test_a_page_of_another_site_is_refused(server: Server, kind: str, origin: str) -> None:
    headers = [f"Origin: {origin}", *([f"Content-Type: {kind}"] if kind else [])]
    status, body = send(server, post(SHORT, *headers))
    assert (status, body["error"]["code"]) == (403, "origin_not_allowed")


def test_the_servers_own_page_may_ask(server: Server) -> None:
    headers = ("Content-Type: application/json", "Origin: http://localhost:8000")
    assert send(server, post(SHORT, *headers, host="localhost:8000"))[0] == 200


def test_who_has_a_key_may_come_from_anywhere(keyed: Server) -> None:
    headers = ("Content-Type: application/json", "Origin: https://a.example")
    key = f"Authorization: Bearer {KEYS[0]}"
    assert send(keyed, post(SHORT, *headers, key, host="a.example"))[0] == 200


# --- clients that never finish ---


def test_a_body_that_never_ends_is_408(server: Server) -> None:
    with connected(server, post(b"x" * 100)[:-50]) as connection:
        status, body = answer(connection)
        assert (status, body["error"]["type"]) == (408, "timeout_error")
        assert is_closed(connection)


@pytest.mark.parametrize("begin", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\n"])
def test_a_head_that_never_ends_is_given_up(server: Server, begin: bytes) -> None:
    with connected(server, begin) as connection:
        assert answer(connection)[0] == 408
        assert is_closed(connection)


def test_a_second_head_that_never_ends_is_given_up(server: Server) -> None:
    """The first byte of the next request ends uvicorn's own limit."""
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connected(server, whole) as connection:
        assert answer(connection)[0] == 200
        connection.sendall(b"G")
        assert answer(connection)[0] == 408


def test_dripping_a_head_wins_no_time(server: Server) -> None:
    with connected(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n") as connection:

        def is_refused() -> bool:
            try:
                connection.sendall(b"X-A: b\r\n")
            except ConnectionError:
                return True
            return False

        wait_for(is_refused, pause=0.1)


def test_an_answer_may_take_longer_than_its_request(server: Server) -> None:
    """The limit is on sending, not on waiting."""
    body = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "use_kv_cache": False}
    with connected(server, post(body, "Content-Type: application/json")) as connection:
        status, whole = answer(connection)
        assert status == 200
        assert whole["usage"]["completion_tokens"] > 500


def test_many_idle_connections_do_not_lock_others_out() -> None:
    options = ("--n-ctx", "256", "--parallel", "1", "--max-connections", "20", "--read-timeout", "3")
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
        status, body, headers = server.request("GET", "/v1/models")
        assert (status, body["error"]["code"]) == (503, "too_many_connections")
        assert int(headers["retry-after"]) >= 1
        with connected(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as connection:
            assert answer(connection)[0] == 200
            assert is_closed(connection)  # the place is free for the next one
        assert server.status("GET", "/metrics") == server.status("GET", "/ready") == 200
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
        n_open, began = open_connections(server), time.monotonic()
        connection.sendall(ask * 400)
        wait_for(lambda: open_connections(server) < n_open)
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
        wait_for(lambda: len(readable(connections)) >= 3)
        answers = [answer(connection)[0] for connection in readable(connections)]
        assert answers == [429] * 3  # 17 are as many bytes as 16 of the largest size
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


def test_large_bodies_that_never_end_are_given_up(server: Server) -> None:
    with ExitStack() as stack:
        part = post(b" " * 900_000)[:-1]
        connections = [stack.enter_context(connected(server, part)) for _ in range(17)]
        assert [answer(connection)[0] for connection in connections] == [408] * 17
    wait_for(lambda: send(server, post(b" " * 900_000))[0] == 400)  # all is given back


def test_tiny_chunks_hold_nobody_up(keyed: Server) -> None:
    """h11 takes some 40 microseconds for each: with 256 KiB read at a time others are answered once or
    twice meanwhile, with 8 KiB 15 times and more.
    """
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    key = f"Authorization: Bearer {KEYS[0]}\r\n\r\n".encode()
    data = head + key + b"1\r\na\r\n" * 150_000 + b"0\r\n\r\n"
    with ThreadPoolExecutor(1) as pool:
        sending, n_others = pool.submit(send, keyed, data), 0
        while not sending.done():
            assert keyed.status("GET", "/health") == 200
            n_others += 1
    assert sending.result()[0] == 400
    assert n_others >= 6


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


# --- names and values that are traps ---


@pytest.mark.parametrize(
    "call",
    [
        '{"a": "%s"}' % ("x" * 200_000),
        '{"a": "\\ud800"}',
        '{"a": %s}' % ("[" * 230 + "]" * 230),
        '{"a": %s}' % ("[" * 900 + "]" * 900),
    ],
)
def test_a_context_that_cannot_be_written_down_is_refused(server: Server, call: str) -> None:
    body = f'{{"model": "{MODEL}", "messages": [{{"role": "assistant", "tool_calls": [{call}]}}]}}'
    status, answer, _ = server.request("POST", "/v1/context", raw=body.encode())
    assert (status, answer["error"]["param"]) == (400, "messages"), answer
    assert all(seq["state"] != "kept" for seq in server.stats()["sequences"])


def test_a_long_name_of_a_field_is_not_repeated(server: Server) -> None:
    status, answer, _ = server.request("POST", "/v1/completions", {"prompt": "x", "a" * 100_000: 1})
    assert status == 400
    assert len(json.dumps(answer)) < 1000


# --- texts that are traps ---


@pytest.fixture(scope="module")
def language() -> Iterator[Tokenizer]:
    llm = Llama(model_path(), n_ctx=256, n_threads=1, verbose=False)
    yield Tokenizer(llm)
    llm.close()


def test_a_text_in_chunks_has_the_tokens_of_the_whole(
    language: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    special = [language._piece_text(token) for token in range(language.n_vocab)]
    special = [text for text in special if text.startswith("<|") and text.endswith("|>")]
    assert len(special) > 3
    r = random.Random(1)
    words = [*special, "a", "  ", "\n", "hello world", "<|", "|>", "<"]
    texts = ["".join(r.choices(words, k=50)) for _ in range(200)]
    for start in (True, False):
        whole = [language.tokenize(text, start=start, special=True) for text in texts]
        with monkeypatch.context() as patch:
            patch.setattr("mixedkv.engine.tokenizer._CHUNK", 40)
            assert min(len(list(language._chunks(text))) for text in texts) > 1
            assert [language.tokenize(text, start=start, special=True) for text in texts] == whole


def test_many_special_tokens_take_time_by_their_number(language: Tokenizer) -> None:
    """llama.cpp alone takes half a minute for these."""

    def seconds(n: int) -> float:
        """Of this process alone, whatever else runs."""
        began = time.process_time()
        assert len(language.tokenize("<|end|>x" * n, start=False, special=True, n_ctx=4 * n)) >= 2 * n
        return time.process_time() - began

    assert seconds(20_000) < 10 * seconds(5_000)


# --- schemas and grammars that take long ---


def _chain(depth: int) -> dict[str, Any]:
    """Definitions of two objects each, which differ after what the one before says."""
    links: dict[str, Any] = {"a0": {"const": 1}}
    for i in range(depth):
        first = {"$ref": f"#/$defs/a{i}"}
        objects = [{"properties": {"a": first, "b": {"const": b}}, "required": ["a", "b"]} for b in (1, 2)]
        links[f"a{i + 1}"] = {"anyOf": objects}
    return {"$ref": f"#/$defs/a{depth}", "$defs": links}


def _hostile() -> list[dict[str, Any]]:
    """Fields of requests."""
    patterns = ["^(a?){40}a{40}$", "^(a|a)*$", "^(a{900}){900}$", "[a-z].{100}$", ".*foo", "\ud800",
                "\\ud800", "^([\\p{L}\\p{N}]{1,50}[^a]{1,50}){50}$"]  # fmt: skip
    schemas: list[dict[str, Any]] = [{"type": "string", "pattern": pattern} for pattern in patterns]
    schemas += [
        {"properties": {"a": {"$ref": "#"}}},
        {"$ref": "#"},
        _chain(12),
        _chain(150),  # 31 KiB
        {"type": "object", "properties": {f"property_{i}": {} for i in range(900)}},
        {"enum": [f"x{i}" for i in range(6000)]},  # 64 KiB
        {"enum": ["x" * 65_000]},
        {"enum": ["\ud800"]},
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
        {"type": "number", "multipleOf": 0.0009973},
    ]
    formats = [{"type": "json_schema", "json_schema": {"name": "x", "schema": schema}} for schema in schemas]
    grammars = [
        'root ::= root root | root root root | "a" | "b" | ""',
        'root ::= "a"{0,100000} a*\na ::= b | "c" | ""\nb ::= "a" a',
        "root ::= " + " ".join('"a"' for _ in range(8000)),
        "root ::= a0\n" + "\n".join(f'a{i} ::= "x" a{i + 1}' for i in range(340)) + '\na340 ::= "a"',
    ]
    return [
        *({"response_format": wanted} for wanted in formats),
        *({"grammar": grammar} for grammar in grammars),
        *({"regex": regex} for regex in ("(a?){40}a{40}", "(.*a.{12})+", "a" * 30_000)),
    ]


def _stream(server: Server, stop: threading.Event) -> list[float]:
    """Seconds between the pieces of streams, one after the other, until told to stop."""
    gaps = []
    body = {"prompt": "x", "max_tokens": 500, "stream": True, "ignore_eos": True}
    while not stop.is_set():
        with connected(server, post(body, "Content-Type: application/json")) as connection:
            last = None
            for line in connection.makefile("rb"):
                now = time.perf_counter()
                if line.startswith(b"data: {"):
                    gaps += [now - last] if last else []
                    last = now
                if line.startswith(b"data: [DONE]"):
                    break
            assert last, "the stream had no token"
    return gaps


def _gaps_beside(server: Server, bodies: list[dict[str, Any]]) -> tuple[list[float], list[int]]:
    """Of a stream beside these requests; and their statuses."""
    stop, statuses = threading.Event(), []
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(_stream, server, stop)
        try:
            for body in bodies:
                request = {"messages": CHAT, "max_tokens": 40, "temperature": 1.5, "seed": 1, **body}
                statuses.append(server.status("POST", "/v1/chat/completions", request))
        finally:
            stop.set()
        return future.result(60), statuses


def test_hostile_schemas_fail_alone(server: Server) -> None:
    _, statuses = _gaps_beside(server, _hostile())
    assert set(statuses) == {200, 400}
    assert server.status("GET", "/health") == 200


@pytest.mark.bench
def test_hostile_schemas_stall_no_stream(server: Server) -> None:
    quiet, _ = _gaps_beside(server, [{}] * 30)
    gaps, _ = _gaps_beside(server, _hostile())
    worst = {"quiet": max(quiet), "all": max(gaps)}
    for i, body in enumerate(_hostile()):
        worst[f"{i} {json.dumps(body)[:90]}"] = max(_gaps_beside(server, [body] * 3)[0])
    for name, seconds in worst.items():
        print(f"{seconds * 1e3:7.1f} ms  {name}")
    assert worst["all"] < 0.1


# --- clients that go ---


def test_a_context_whose_client_has_gone_leaves_nothing(tmp_path: Path) -> None:
    """Whether it was registered or not: what is kept and stored is that of sessions that can be deleted.

    They leave at any time between asking and well after the answer.
    """
    options = ("--n-ctx", "4096", "--parallel", "2", "--idle-prefixes", "60", "--store", str(tmp_path))
    r = random.Random(5)
    with running(*options) as server:
        for i in range(40):
            body = {"model": MODEL, "prompt": make_recall(i, 6).text, "ttl": 6000, "session_id": f"s{i}"}
            data = post(body, "Content-Type: application/json", path="/v1/context")
            with connected(server, data) as connection:
                if i % 4 == 0:
                    began = time.monotonic()
                    assert answer(connection)[0] == 201
                    whole = time.monotonic() - began
                else:
                    time.sleep(r.choice((0, 1.5)) * r.random() * whole)
        server.wait_until_idle()
        sessions = [f"/v1/context/s{i}" for i in range(40)]
        lost = [path for path in sessions if server.status("GET", path) == 404]
        assert lost
        assert len(lost) < 40
        n_kept = sum(seq["state"] == "kept" for seq in server.stats()["sequences"])
        assert n_kept == 40 - len(lost)
        for path in set(sessions) - set(lost):
            assert server.status("DELETE", path) == 200
        wait_for(lambda: not server.wait_until_idle()["store"]["n_entries"])
        assert all(seq["state"] != "kept" for seq in server.stats()["sequences"])


def test_the_page_is_not_given_in_a_thousand_ranges(server: Server) -> None:
    ranges = ",".join(f"{i}-{i + 1}" for i in range(0, 9000, 3))
    head = f"GET / HTTP/1.1\r\nHost: localhost\r\nRange: bytes={ranges}\r\n\r\n"
    with connected(server, head.encode()) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


# --- tenants ---


def test_a_session_of_another_tenant_looks_like_none(keyed: Server) -> None:
    made = {"model": MODEL, "prompt": "Where is the key to the house? " * 4, "ttl": 60, "session_id": "mine"}
    assert keyed.request("POST", "/v1/context", made, key=KEYS[0])[0] == 201
    for method, path, body in (
        ("GET", "/v1/context/{}", None),
        ("PATCH", "/v1/context/{}", {"ttl": 5}),
        ("DELETE", "/v1/context/{}", None),
        ("POST", "/v1/completions", {"prompt": "x", "session_id": "{}"}),
        ("POST", "/v1/chat/completions", {"messages": CHAT, "session_id": "{}"}),
    ):

        def ask(name: str) -> tuple[int, str]:
            changed = body and json.loads(json.dumps(body).replace("{}", name))  # noqa: B023
            status, answer, headers = keyed.request(method, path.format(name), changed, key=KEYS[1])  # noqa: B023
            return status, json.dumps([answer, sorted(headers)]).replace(name, "ID")

        assert ask("mine") == ask("none")
        assert ask("mine")[0] == 404
    assert keyed.request("GET", "/v1/context/mine", key=KEYS[0])[1]["ttl"] == 60
    assert keyed.request("POST", "/v1/context", made, key=KEYS[1])[0] == 201  # a name of one's own


@pytest.mark.parametrize(
    "header",
    [
        *("Bearer", "Bearer ", "Bearer \xff", KEYS[0]),
        *(f"Basic {KEYS[0]}", f"Bearer {KEYS[0]}x", f"Bearer {KEYS[0][:-1]}"),
    ],
)
def test_no_door_opens_without_a_key(keyed: Server, header: str) -> None:
    for line in ("GET /v1/models", "GET /v1/stats", "GET /v1/context/mine", "DELETE /v1/context/mine"):
        head = f"{line} HTTP/1.1\r\nHost: x\r\nAuthorization: {header}\r\n\r\n".encode("latin-1")
        status, body = send(keyed, head)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/warm", {"prompt": "x"}),
        ("/v1/context", {"prompt": "x", "model": MODEL}),
    ):
        headers = (f"Authorization: {header}", "Content-Type: application/json")
        assert send(keyed, post(body, *headers, path=path))[0] == 401


def test_neither_keys_nor_tenants_nor_texts_are_in_the_log(keyed: Server) -> None:
    secret = "xyzzy-4711"
    schema = {"enum": [secret, '\\" | root "'], "pattern": f"^({secret}|{secret})*$", "type": "string"}
    chat = {"messages": [{"role": "user", "content": secret}], "max_tokens": 2}
    for key in (*KEYS, secret * 2):
        for body in (
            chat,
            {**chat, "response_format": {"type": "json_object", "schema": schema}},
            {**chat, "response_format": {"type": "json_object", "schema": {"pattern": schema["pattern"]}}},
            {**chat, "session_id": secret},
            {**chat, secret: secret},
            {**chat, "messages": [{"role": secret, "content": secret}]},
            {**chat, "model": secret, "user": secret, "metadata": {secret: secret}},
        ):
            keyed.request("POST", "/v1/chat/completions", body, key=key)
        context = {"model": MODEL, "prompt": secret, "session_id": secret}
        keyed.request("POST", "/v1/context", context, key=key)
        keyed.request("GET", f"/v1/context/{secret}", key=key)
        keyed.request("GET", f"/{secret}?{secret}", key=key)
        keyed.request(secret.upper().replace("-", "X"), f"/{secret}", key=key)
    metrics = keyed.request("GET", "/metrics")[1]
    everything = (keyed.log + metrics).lower()
    assert "mixedkv:http_requests_total" in metrics
    for word in (secret, "xyzzyx4711", "anna", "ben:", '"ben"', *KEYS):
        assert word not in everything, word
