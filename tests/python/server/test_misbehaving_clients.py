"""Clients that go, send nonsense or ask for too much, and servers that are told to stop."""

from __future__ import annotations

import json
import random
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from mixedkv.bundled.corpus import make_recall
from support.patience import PATIENCE, wait_for
from support.servers.server import MODEL, Server, key_file, running

pytestmark = pytest.mark.full

N_CTX = "131072"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--parallel", "4", "--max-queue", "4", "--n-ctx", N_CTX, "--max-body-mb", "1") as server:
        yield server


def endless(stream: bool = True, seed: int = 1) -> dict[str, object]:
    """A request that runs for minutes; four of them fit the context of the shared server."""
    return {"prompt": make_recall(seed, 5).text, "max_tokens": 30_000, "stream": stream, "ignore_eos": True}


def connect(server: Server, body: object, path: str = "/v1/completions") -> socket.socket:
    """Send a request and leave the answer to the caller."""
    data = json.dumps(body).encode()
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    )
    head = "\r\n".join([*lines, "", ""])
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    connection.sendall(head.encode() + data)
    return connection


def test_clients_that_misbehave_leave_nothing(server: Server) -> None:
    """24 clients; afterwards the server is as idle as before, and still answers."""
    failures: list[BaseException] = []

    def client(seed: int) -> None:
        r = random.Random(seed)
        for _ in range(6):
            try:
                misbehave(server, r)
            except OSError as error:
                if server.process.poll() is not None:
                    failures.append(error)
            except AssertionError as error:
                failures.append(error)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    now = server.wait_until_idle()
    assert all(seq["state"] != "running" for seq in now["sequences"])
    recall = make_recall(50, 12)
    answer = server.post("/v1/chat/completions", {"messages": recall.messages, "temperature": 0})
    assert answer["choices"][0]["message"]["content"] == recall.fact.answer
    assert "Traceback" not in server.log


def misbehave(server: Server, r: random.Random) -> None:
    kind = r.randrange(6)
    if kind == 0:  # goes in the middle of an answer
        with connect(server, endless(r.random() < 0.5, r.randrange(5))) as connection:
            connection.settimeout(r.random() * 0.3)
            try:
                connection.recv(4096)
            except TimeoutError:
                return
    elif kind == 1:  # goes in the middle of its own body
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
            connection.sendall(b"POST /v1/warm HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    elif kind == 2:
        assert (
            server.status("POST", "/v1/completions", raw=bytes(r.randrange(256) for _ in range(200))) == 400
        )
    elif kind == 3:
        assert (
            server.status("POST", "/v1/completions", {"prompt": "x", "temperature": -1 - r.random()}) == 400
        )
    elif kind == 4:
        server.status("POST", "/v1/completions", raw=b" " * 1_200_000)
    else:
        body = {"prompt": make_recall(r.randrange(9), 12).text, "max_tokens": 8, "temperature": 0}
        assert server.status("POST", "/v1/completions", body) in (200, 429)


@pytest.mark.nightly
def test_a_locked_session_database_holds_up_no_plain_request(tmp_path: Path) -> None:
    """Another program has locked it: requests for sessions wait, and fail; nothing else does."""
    path = tmp_path / "sessions.sqlite3"
    with running("--n-ctx", "1024", "--metadata-url", f"sqlite:{path}") as server, ExitStack() as stack:
        body = {"model": MODEL, "prompt": "a session"}
        session_id = server.post("/v1/context", body)["session_id"]
        lock = sqlite3.connect(path, isolation_level=None)
        stack.callback(lock.close)
        lock.execute("BEGIN EXCLUSIVE")
        waiting = [stack.enter_context(connect(server, body, "/v1/context")) for _ in range(64)]
        for i in range(10):
            chat = {"messages": [{"role": "user", "content": f"{i}"}], "max_tokens": 2}
            assert server.status("POST", "/v1/chat/completions", chat) == 200
        assert len(select.select(waiting, (), (), 0)[0]) < 64  # who writes sessions still waits
        lock.execute("ROLLBACK")
        assert server.status("DELETE", f"/v1/context/{session_id}") == 200


def test_sigterm_lets_answers_finish_and_exits_0() -> None:
    with running("--drain-timeout", "1000") as server, ThreadPoolExecutor(1) as pool:
        recall = make_recall(1, 12)
        body = {"prompt": recall.text, "max_tokens": 400, "ignore_eos": True}
        answer = pool.submit(server.request, "POST", "/v1/completions", body)
        wait_for(lambda: server.stats()["requests"]["running"] or answer.done())
        assert server.stop(signal.SIGTERM) == 0
        status, whole, _ = answer.result()
        assert status == 200
        assert whole["usage"]["completion_tokens"] == 400


@pytest.mark.nightly
def test_sigterm_waits_for_nobody_who_does_not_finish() -> None:
    """A head that never ends, a body that never ends, and an answer that is never read: they have hours."""
    options = ("--n-ctx", "4096", "--read-timeout", "9999", "--request-timeout", "9999")
    with running("--drain-timeout", "1", *options) as server, ExitStack() as stack:
        whole = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
        for data in (b"", whole[:30], whole):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            connection.sendall(data)
        deaf = stack.enter_context(socket.socket())
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", server.port))
        deaf.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400)
        time.sleep(0.3)
        assert server.stop(signal.SIGTERM) == 0


@pytest.mark.nightly
def test_sigterm_while_prompts_are_warmed_stores_them(tmp_path: Path) -> None:
    path = tmp_path / "warm.jsonl"
    texts = [make_recall(i, 40).text for i in range(2000)]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    store = tmp_path / "store"
    server = Server("--warm", str(path), "--store", str(store), "--n-ctx", "2048")
    try:
        wait_for(lambda: sum(1 for _ in store.rglob("*.safetensors")) >= 3)
        assert server.stop(signal.SIGTERM) == 0
        assert "Traceback" not in server.log
    finally:
        server.stop(signal.SIGKILL)
    with running("--store", str(store), "--n-ctx", "2048") as again:
        usage = again.post("/v1/completions", {"prompt": texts[0], "max_tokens": 1})["usage"]
        assert usage["prompt_tokens_details"]["cached_tier"] == "disk"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.nightly
def test_a_second_signal_changes_nothing(number: int) -> None:
    with running("--drain-timeout", "1", "--n-ctx", N_CTX) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.request, "POST", "/v1/completions", endless(stream=False))
        wait_for(lambda: server.stats()["requests"]["running"])
        server.process.send_signal(number)
        time.sleep(0.2)
        assert server.stop(number) == 0
        assert answer.result()[0] == 503
        assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--host", "0.0.0.0"), "--api-key-file"),
        (("--model", "/nowhere.gguf"), "/nowhere.gguf"),
        (("--kv", "odd"), "odd"),
        (("--config", "/nowhere.toml"), "/nowhere.toml"),
        (("--api-key-file", "/nowhere.keys"), "/nowhere.keys"),
        (("--warm", "/nowhere.jsonl"), "/nowhere.jsonl"),
        (("--metadata-url", "mysql:x"), "metadata"),
        (("--chat-format", "odd"), "--chat-format=odd: No such file or directory"),
        (("--port", "x"), "--port"),
    ],
)
@pytest.mark.nightly
def test_a_bad_option_is_one_line_and_exit_code_2(options: tuple[str, ...], message: str) -> None:
    command = [sys.executable, "-m", "mixedkv", "serve", "--port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.nightly
def test_a_line_of_the_warm_file_is_a_tenants(tmp_path: Path) -> None:
    recall = make_recall(61, 20)
    path, keys = tmp_path / "warm.jsonl", ("anna-key-0123456789", "ben-key-01234567890")
    path.write_text(json.dumps({"tenant": "ben", "messages": recall.messages[:2]}) + "\n")
    file = key_file(tmp_path, f"anna:{keys[0]}", f"ben:{keys[1]}")
    with running("--warm", str(path), "--api-key-file", str(file)) as server:
        for key, is_warm in zip(keys, (False, True), strict=True):
            body = {"model": MODEL, "messages": recall.messages, "temperature": 0}
            usage = server.post("/v1/chat/completions", body, key=key)["usage"]
            assert (usage["prompt_tokens_details"]["cached_tokens"] > 100) == is_warm


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "pydantic", "prometheus_client"])
@pytest.mark.nightly
def test_without_the_extra_the_message_says_what_to_install(package: str) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None; import mixedkv.cli as c; sys.exit(c.main(['serve']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert package in done.stderr
    assert "mixedkv[server]" in done.stderr
