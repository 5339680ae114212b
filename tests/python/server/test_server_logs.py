"""What goes to the log: ids to find it by, no text of clients, no line that a client made, no flood."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest

from mixedkv.server.logs import Formatter, RateLimit, request_id
from support.patience import wait_for
from support.server_support import Server, running

SECRET = "xyzzy-4711"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--n-ctx", "512", "--access-log") as server:
        yield server


def record(message: str, *args: object, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("mixedkv", level, __file__, 1, message, args, None)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("GET", "/none", 404),
        ("PUT", "/health", 405),
        ("POST", "/v1/completions", 400),
    ],
)
def test_every_answer_has_an_id_of_its_own(server: Server, method: str, path: str, status: int) -> None:
    answers = [server.request(method, path) for _ in range(2)]
    assert [answer[0] for answer in answers] == [status] * 2
    ids = [answer[2]["x-request-id"] for answer in answers]
    assert all(re.fullmatch(r"req-[0-9a-f]{24}", name) for name in ids)
    assert ids[0] != ids[1]


def test_an_event_stream_has_an_id(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 2, "stream": True}
    assert "x-request-id" in server.request("POST", "/v1/completions", body)[2]


def test_the_access_log_has_a_line_for_each_answer_and_no_text(server: Server) -> None:
    body = {"prompt": SECRET, "max_tokens": 2}
    _, _, headers = server.request("POST", f"/v1/completions?{SECRET}", body)
    wait_for(lambda: headers["x-request-id"] in server.log)
    (line,) = [line for line in server.log.splitlines() if headers["x-request-id"] in line]
    assert re.fullmatch(r"INFO: \[req-\w+\] POST /v1/completions 200 \d+ bytes \d+\.\d{3} s", line)
    _, _, headers = server.request("GET", f"/v1/context/{SECRET}")
    wait_for(lambda: f"[{headers['x-request-id']}] GET /v1/context/{{session_id}} 404" in server.log)
    _, _, headers = server.request(SECRET.upper().replace("-", "X"), f"/{SECRET}")
    wait_for(lambda: f"[{headers['x-request-id']}] other other 40" in server.log)
    assert SECRET not in server.log
    assert "XYZZY" not in server.log


def test_without_the_option_there_is_no_access_log() -> None:
    with running("--n-ctx", "512") as server:
        _, _, headers = server.request("GET", "/health")
        assert server.stop() == 0
        assert headers["x-request-id"] not in server.log


def test_a_message_makes_no_lines_of_its_own() -> None:
    text = Formatter().format(record("wrong: %s", "a\nINFO: forged\r\x1b[2J\x85\u2028b"))
    assert text.splitlines() == [text]
    assert text == r"WARNING: wrong: a\nINFO: forged\r\x1b[2J\x85\u2028b"


def test_lines_of_a_traceback_cannot_be_taken_for_others() -> None:
    failed = record("a request failed")
    try:
        raise ValueError("a\nINFO: forged\x1b[2J")
    except ValueError as error:
        failed.exc_info = (ValueError, error, error.__traceback__)
    first, *rest = Formatter().format(failed).splitlines()
    assert first == "WARNING: a request failed"
    assert "    INFO: forged\\x1b[2J" in rest
    assert all(line.startswith("    ") for line in rest)


def test_a_record_has_the_id_of_its_request() -> None:
    token = request_id.set("req-1")
    try:
        assert Formatter().format(record("x")) == "WARNING: [req-1] x"
    finally:
        request_id.reset(token)


def test_one_warning_again_and_again_is_cut_short() -> None:
    now = [0.0]
    limit = RateLimit(clock=lambda: now[0])
    passed = [limit.filter(record("store: %s", i)) for i in range(50)]
    assert passed == [True] * 10 + [False] * 40
    assert limit.filter(record("another"))
    assert limit.filter(record("said %s", 1, level=logging.INFO))
    now[0] = 61.0
    again = record("store: %s", 50)
    assert limit.filter(again)
    assert again.getMessage() == "store: 50 (and 40 more like it)"
    assert limit.filter(record("store: %s", 51))


def test_kinds_of_warnings_are_told_apart_by_what_the_code_says() -> None:
    limit = RateLimit()
    for i in range(5000):
        limit.filter(record("store: %s", i))
    assert len(limit) == 1
    for i in range(5000):
        limit.filter(record(f"of others: {i}"))
    assert len(limit) <= 1000
