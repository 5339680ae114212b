"""Bodies that cost more than they are: invalid in a million places, or large and many."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fastapi.exceptions import RequestValidationError

from mixedkv.work.fair_pool import FairPool
from mixedkv.work.turns import unlimited
from mixedkv_server.api.schemas import ChatRequest, CompletionRequest
from mixedkv_server.api_error import ApiError
from mixedkv_server.fields import MAX_MESSAGES
from mixedkv_server.http.json_body import SaidOnce, parse, shown
from mixedkv_server.pools import LARGE
from mixedkv_service.settings import in_words
from support.patience import PATIENCE
from support.servers.remote import redis_server
from support.servers.server import MODEL, Server, running

pytestmark = pytest.mark.full

MB = 10**6
USER = {"role": "user", "content": "x"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--n-ctx", "1024", "--parallel", "2", "--embeddings") as server:
        yield server


def memory(server: Server, name: str) -> int:
    """Bytes: VmRSS, what the process has; VmHWM, the most it had."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def repeated(part: str, size: int = 7_900_000) -> str:
    return ",".join([part] * (size // (len(part) + 1)))


BODIES = {
    "parts": ("/v1/chat/completions", '{"messages":[{"role":"user","content":[' + repeated("{}") + "]}]}"),
    "parts that are none": (
        "/v1/chat/completions",
        '{"messages":[{"role":"user","content":[' + repeated("1") + "]}]}",
    ),
    "messages": ("/v1/chat/completions", '{"messages":[' + repeated('{"role":1,"content":[],"x":1}') + "]}"),
    "few messages": (
        "/v1/chat/completions",
        '{"messages":[' + repeated('{"role":1,"content":[],"x":1}', 30 * 100_000) + "]}",
    ),
    "unknown fields": (
        "/v1/chat/completions",
        json.dumps({"messages": [USER], **{str(i): 1 for i in range(550_000)}}),
    ),
    "fields of a message": (
        "/v1/chat/completions",
        json.dumps({"messages": [{**USER, **{str(i): 1 for i in range(550_000)}}]}),
    ),
    "metadata": (
        "/v1/chat/completions",
        json.dumps({"messages": [USER], "metadata": {str(i): 1 for i in range(550_000)}}),
    ),
    "logit_bias": (
        "/v1/completions",
        json.dumps({"prompt": "x", "logit_bias": {str(i): "" for i in range(500_000)}}),
    ),
    "negative tokens": ("/v1/completions", '{"prompt":[' + repeated("-1") + "]}"),
    "lists of them": ("/v1/completions", '{"prompt":[' + repeated("[-1]") + "]}"),
    "stops": ("/v1/completions", '{"prompt":"x","stop":[' + repeated("1") + "]}"),
    "inputs": ("/v1/embeddings", '{"input":[' + repeated("-1") + "]}"),
    "lists of inputs": ("/v1/embeddings", '{"input":[' + repeated("[-1]") + "]}"),
    "warm": ("/v1/warm", '{"prompt":[' + repeated("-1") + "]}"),
    "context": ("/v1/context", '{"model":"m","messages":[' + repeated('{"role":1}', 11 * 90_000) + "]}"),
    "tool calls": (
        "/v1/context",
        '{"model":"m","messages":[{"role":"user","tool_calls":[' + repeated("1") + "]}]}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_what_is_wrong_in_many_places_is_said_once(server: Server, name: str) -> None:
    path, body = BODIES[name]
    before = memory(server, "VmRSS")
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")  # VmHWM begins anew
    status, answer, _ = server.request("POST", path, raw=body.encode())
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert len(json.dumps(answer)) < 1000
    assert memory(server, "VmHWM") - before < 300 * MB


def test_a_large_body_is_what_a_small_one_is(server: Server) -> None:
    fields = {"prompt": "the lamp", "max_tokens": 4, "seed": 1}
    large = json.dumps(fields) + " " * 2 * LARGE
    want = server.post("/v1/completions", fields)
    status, answer, _ = server.request("POST", "/v1/completions", raw=large.encode())
    assert status == 200, answer
    assert answer["choices"] == want["choices"]
    status, answer, _ = server.request("POST", "/v1/completions", raw=b'{"prompt":' + b" " * 2 * LARGE)
    assert (status, answer["error"]["code"]) == (400, "invalid_json")


PART = {"role": "user", "content": [{"type": "text", "text": 'a, "b": [\\' * 20}]}
FULL = [
    ("/v1/chat/completions", "messages", USER),
    ("/v1/chat/completions", "messages", PART),
    ("/v1/messages", "messages", PART),
    ("/api/chat", "messages", USER),
    ("/v1/responses", "input", USER),
    ("/v1/context", "messages", USER),
]


@pytest.mark.parametrize(("path", "field", "message"), FULL)
def test_the_number_of_messages_is_limited(
    server: Server, path: str, field: str, message: dict[str, object]
) -> None:
    limit = {} if path == "/v1/responses" else {"max_tokens": 1}
    body = {"model": MODEL, **limit, field: [message] * MAX_MESSAGES}
    status, answer, _ = server.request("POST", path, body)
    assert status == 400
    assert "entries" not in str(answer)
    body[field] = [message] * (MAX_MESSAGES + 1)
    status, answer, _ = server.request("POST", path, body)
    assert status == 400
    assert "it has 4097 entries, at most 4096 are taken" in str(answer)


def test_values_are_counted_outside_texts() -> None:
    text = '{"a":[1,2]},:' * 100_000
    for prompt in (text, text + "\\", text + '"\\"' * 200_000):
        found, _ = parse(CompletionRequest, json.dumps({"prompt": prompt}).encode(), strict=True)
        assert found.prompt == prompt
    for many in ([{}] * 70_000, [1] * 300_000, {str(i): "," for i in range(70_000)}, ['\\"'] * 700_000):
        body = json.dumps({"prompt": "x", "more": many}).encode()
        with pytest.raises(ApiError, match="32768 objects, lists and fields, or 262144 values"):
            parse(CompletionRequest, body, strict=False)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "latin-1"])
def test_other_encodings_than_utf8_are_refused(encoding: str) -> None:
    """In them a letter may have the byte of a quote: U+0122, or one of a list's brackets."""
    body = '{"user":"\u00c4","prompt":"x","more":[' + ",".join(["[]"] * 100) + "]}"
    with pytest.raises(ApiError, match="the body is not in UTF-8"):
        parse(CompletionRequest, body.encode(encoding), strict=False)
    for ours in ("utf-8", "utf-8-sig"):
        assert parse(CompletionRequest, body.encode(ours), strict=False)[0].prompt == "x"


def test_parts_are_counted_whatever_the_content_type_is_spelled_like(server: Server) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1, "more": [[]] * 40_000}).encode()
    for kind in ("application/json", "application/JSON", "Application/Vnd.x+Json"):
        url, headers = f"{server.url}/v1/completions", {"Content-Type": kind}
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=PATIENCE)
        assert json.loads(refused.value.read())["error"]["code"] == "too_many_parts", kind


NAMES = {"pairs": "a[]." * 1_900_000 + "!", "words": "a_" * 3_900_000, "dots": "a." * 3_900_000}


@pytest.mark.parametrize("name", NAMES)
def test_a_field_of_any_length_is_unknown_at_once(name: str) -> None:
    _, fields = parse(CompletionRequest, json.dumps({"prompt": "x", NAMES[name]: 1}).encode(), strict=False)
    began = time.thread_time()
    assert shown(fields.unknown) == ["(an odd name)"]
    SaidOnce().ignored_fields("/v1/completions", fields.unknown)
    assert time.thread_time() - began < 0.1


def test_so_many_unknown_fields_are_told_and_no_more() -> None:
    messages = [{**USER, **{f"b{i}x{j}": 1 for j in range(200)}} for i in range(100)]
    _, fields = parse(ChatRequest, json.dumps({"messages": messages}).encode(), strict=False)
    assert 0 < len(fields.unknown) <= 200


def test_a_tag_of_any_length_is_quoted_in_part() -> None:
    """The message of a union's error has the client's text in it, and patterns went through it."""
    tag = "' found using ' does not match any of the expected tags: " * 100_000
    body = json.dumps({"messages": [{"role": "user", "content": [{"type": tag}]}]}).encode()
    began = time.thread_time()
    with pytest.raises(RequestValidationError) as refused:
        parse(ChatRequest, body, strict=False)
    message = in_words(refused.value.errors()[0]["msg"])
    assert time.thread_time() - began < 1
    assert len(message) < 1000


def test_large_bodies_are_parsed_off_the_event_loop() -> None:
    """The loop goes on while four of them are parsed, whatever the machine does beside it."""
    large = json.dumps({"messages": [PART] * MAX_MESSAGES}).encode()

    async def time_of_the_loop() -> float:
        pool = FairPool(1, "test", unlimited)
        began = time.thread_time()
        await asyncio.gather(*(pool.run(name, parse, ChatRequest, large, False) for name in "abcd"))
        pool.close()
        return time.thread_time() - began

    began = time.thread_time()
    parse(ChatRequest, large, strict=False)
    alone = time.thread_time() - began
    assert asyncio.run(time_of_the_loop()) < alone / 2


def test_an_unknown_type_of_content_is_named(server: Server) -> None:
    command = ["curl", "-s", f"{server.url}/v1/completions", "-d", '{"prompt": "x"}']
    answer = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert "Content-Type: application/json" in answer["error"]["message"]


@pytest.mark.needs("redis")
@pytest.mark.parametrize("old", [False, True], ids=["installed", "redis-py 5"])
@pytest.mark.nightly
def test_a_stopped_redis_holds_up_sessions_only(tmp_path: Path, old: bool) -> None:
    """Also with redis-py 5, which waits for ever unless it is told: `pip install -t DIR redis==5.0.8`."""
    environ = {}
    if old:
        folder = os.environ.get("MIXEDKV_TEST_REDIS5")
        if not folder:
            pytest.skip("MIXEDKV_TEST_REDIS5 names no folder with redis-py 5")
        environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    options = ("--n-ctx", "512", "--parallel", "2", "--request-timeout", "4", "--drain-timeout", "1")
    with redis_server(tmp_path, "--unixsocket", str(tmp_path / "s")) as (redis, _):
        options += ("--metadata-url", f"unix://{tmp_path / 's'}")
        with running(*options, environ=environ) as server:
            made = {"model": MODEL, "prompt": "x", "session_id": "a"}
            assert server.status("POST", "/v1/context", made) == 201
            redis.send_signal(signal.SIGSTOP)
            with ThreadPoolExecutor(1) as pool:
                asking = pool.submit(server.request, "GET", "/v1/context/a")
                assert server.status("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}) == 200
                status, answer, _ = asking.result()
            assert (status, answer["error"]["code"]) == (504, "timeout")
            assert server.stop() == 0


def test_a_body_of_two_lengths_is_refused(server: Server) -> None:
    """What a proxy takes for the end of a request and what we do would not be the same."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(f"{head}\r\n0\r\n\r\n".encode())
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"do not go together" in answer


def test_an_answer_of_openais_can_be_sent_back(server: Server) -> None:
    echo = {"audio": None, "function_call": None, "tool_calls": None, "annotations": [], "refusal": None}
    messages = [USER, {"role": "assistant", "content": "y", **echo}, USER]
    server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    messages[1]["tool_calls"] = [{"id": "a"}]
    assert server.status("POST", "/v1/chat/completions", {"messages": messages}) == 400


@pytest.mark.parametrize("field", ["web_search_options"])
def test_what_is_not_done_is_not_ignored(server: Server, field: str) -> None:
    status, answer, _ = server.request("POST", "/v1/chat/completions", {"messages": [USER], field: {}})
    assert (status, answer["error"]["message"]) == (
        400,
        f"{field} is not supported by this server: leave it out",
    )


def test_health_has_a_head(server: Server) -> None:
    assert server.request("HEAD", "/health")[:2] == (200, "")


def test_a_penalty_that_is_too_small_names_its_field(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 1, "repeat_penalty": 0.005}
    status, answer, _ = server.request("POST", "/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "repeat_penalty")
