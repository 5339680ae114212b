"""What goes to the log: ids to find it by, no text of clients, no line that a client made, no flood."""

from __future__ import annotations

import json
import logging
import re
import signal
from collections.abc import Iterator
from functools import partial

import pytest

from mixedkv_server.logs import Formatter, JSONFormatter, RateLimit, message_of, of_model, request_id
from support.patience import wait_for
from support.servers.server import Server, running

pytestmark = pytest.mark.full

SECRET = "xyzzy-4711"
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--n-ctx", "512", "--access-log") as server:
        yield server


def record(message: str, *args: object, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("mixedkv", level, __file__, 1, message, args, None)


def without_time(line: str) -> str:
    found = re.fullmatch(TIME + " (.*)", line)
    assert found is not None, line
    return found[1]


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
    assert re.fullmatch(TIME + r" INFO: \[req-\w+\] POST /v1/completions 200 \d+ bytes \d+\.\d{3} s", line)
    _, _, headers = server.request("GET", f"/v1/context/{SECRET}")
    wait_for(lambda: f"[{headers['x-request-id']}] GET /v1/context/{{session_id}} 404" in server.log)
    _, _, headers = server.request(SECRET.upper().replace("-", "X"), f"/{SECRET}")
    wait_for(lambda: f"[{headers['x-request-id']}] other other 40" in server.log)
    for method, path in (("HEAD", "/v1/models"), ("GET", "/models")):
        _, _, headers = server.request(method, path)
        line = f"[{headers['x-request-id']}] {method} /v1/models 200"
        wait_for(partial(lambda line: line in server.log, line))
    assert SECRET not in server.log
    assert "XYZZY" not in server.log


def test_without_the_option_there_is_no_access_log() -> None:
    with running("--n-ctx", "512") as server:
        _, _, headers = server.request("GET", "/v1/models")
        assert server.stop() == 0
        assert headers["x-request-id"] not in server.log


@pytest.mark.parametrize(
    ("method", "path", "is_logged"),
    [
        ("GET", "/health", False),
        ("GET", "/ready", False),
        ("GET", "/metrics", False),
        ("HEAD", "/health", False),
        ("PUT", "/health", True),
        ("GET", "/v1/models", True),
    ],
)
def test_probes_that_succeed_are_not_in_the_access_log(
    server: Server, method: str, path: str, is_logged: bool
) -> None:
    _, _, headers = server.request(method, path)
    _, _, later = server.request("GET", "/v1/models")
    wait_for(lambda: later["x-request-id"] in server.log)
    assert (headers["x-request-id"] in server.log) == is_logged


def test_sigterm_is_logged_and_how_the_end_went() -> None:
    """On a busy machine the request that asked whether the server is ready may still be at work."""
    with running("--n-ctx", "512", "--drain-timeout", "7") as server:
        assert server.stop(signal.SIGTERM) == 0
    lines = [line for line in server.log.splitlines() if "shut" in line]
    assert re.fullmatch(
        TIME + r" INFO: SIGTERM: shutting down, [01] requests at work have up to 7 s, new ones are refused",
        lines[0],
    )
    assert re.fullmatch(TIME + " INFO: shut down: .*", lines[-1])


def test_as_json_every_line_is_an_object() -> None:
    with running("--n-ctx", "512", "--access-log", "--log-format", "json") as server:
        _, _, headers = server.request("POST", "/v1/completions", {"prompt": SECRET, "max_tokens": 2})
        assert server.stop() == 0
    entries = [json.loads(line) for line in server.log.splitlines()]
    assert all(re.fullmatch(TIME, entry["time"]) for entry in entries)
    assert {entry["level"] for entry in entries} == {"INFO"}
    assert any(entry["message"].startswith("mixedkv serves ") for entry in entries)
    (answer,) = [entry for entry in entries if entry.get("request_id") == headers["x-request-id"]]
    assert (answer["method"], answer["route"], answer["status"]) == ("POST", "/v1/completions", 200)
    assert answer["bytes"] > 0
    assert 0 < answer["seconds"] < 1000
    assert SECRET not in server.log


def test_a_json_record_has_its_traceback_and_its_time() -> None:
    failed = record("a request %s", "a\nb\u2028")
    failed.created = 1.5
    try:
        raise ValueError("x")
    except ValueError as error:
        failed.exc_info = (ValueError, error, error.__traceback__)
    line = JSONFormatter().format(failed)
    assert line.isascii()
    assert "\n" not in line
    entry = json.loads(line)
    assert entry["message"] == "a request a\nb\u2028"
    assert entry["time"] == "1970-01-01T00:00:01.500Z"
    assert entry["exception"].endswith("ValueError: x")


def test_lines_of_a_models_process_have_its_name() -> None:
    assert of_model("small", "a line", "text") == "[small] a line"
    line = JSONFormatter().format(record("said"))
    assert json.loads(of_model("small", line, "json")) == {**json.loads(line), "model": "small"}
    for text in ("from llama.cpp", "[1]", "{"):
        entry = json.loads(of_model("small", text, "json"))
        assert (entry["message"], entry["model"]) == (text, "small")
        assert re.fullmatch(TIME, entry["time"])
    assert message_of(line) == "said"
    assert message_of("a line") == "a line"


def test_a_message_makes_no_lines_of_its_own() -> None:
    text = Formatter().format(record("wrong: %s", "a\nINFO: forged\r\x1b[2J\x85\u2028b"))
    assert text.splitlines() == [text]
    assert without_time(text) == r"WARNING: wrong: a\nINFO: forged\r\x1b[2J\x85\u2028b"


def test_lines_of_a_traceback_cannot_be_taken_for_others() -> None:
    failed = record("a request failed")
    try:
        raise ValueError("a\nINFO: forged\x1b[2J")
    except ValueError as error:
        failed.exc_info = (ValueError, error, error.__traceback__)
    first, *rest = Formatter().format(failed).splitlines()
    assert without_time(first) == "WARNING: a request failed"
    assert "    INFO: forged\\x1b[2J" in rest
    assert all(line.startswith("    ") for line in rest)


def test_a_record_has_the_id_of_its_request() -> None:
    token = request_id.set("req-1")
    try:
        assert without_time(Formatter().format(record("x"))) == "WARNING: [req-1] x"
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
