"""An answer that is cut off, by its client or by the server: each API says so, and nothing goes on."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from support.clients.raw_http import KEYS
from support.models.endless import write_endless_model
from support.patience import PATIENCE, wait_for
from support.servers.server import Server, key_file, running

pytestmark = pytest.mark.full

N_CTX, MANY = 131072, 9000  # as many tokens as 14 answers at a time have room for
CHAT = {"messages": [{"role": "user", "content": "x"}], "temperature": 0}
OLLAMA = {"options": {"num_predict": MANY, "temperature": 0}}
# what an endless answer is asked with, and what a stream has at its end alone
APIS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/completions": ({"prompt": "x", "temperature": 0, "max_tokens": MANY}, "[DONE]"),
    "/v1/chat/completions": ({**CHAT, "max_tokens": MANY}, "[DONE]"),
    "/v1/messages": ({**CHAT, "max_tokens": MANY}, "message_stop"),
    "/v1/responses": (
        {"input": "x", "temperature": 0, "max_output_tokens": MANY, "store": False},
        "response.completed",
    ),
    "/completion": ({"prompt": "x", "temperature": 0, "n_predict": MANY}, '"stop":true'),
    "/api/generate": ({"prompt": "x", **OLLAMA}, '"done":true'),
    "/api/chat": ({**CHAT, **OLLAMA}, '"done":true'),
}
each_api = pytest.mark.parametrize("path", APIS)
whole_and_streamed = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


class Asking:
    """A request whose answer a thread reads."""

    def __init__(self, server: Server, path: str, stream: bool, key: str = "") -> None:
        self.status, self.read, self.path = 0, b"", path
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._connection.request("POST", path, json.dumps({**APIS[path][0], "stream": stream}), headers)
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def leave(self) -> None:
        if (sock := self._connection.sock) is not None:
            sock.shutdown(socket.SHUT_RDWR)
        self.thread.join(PATIENCE)

    @property
    def has_begun(self) -> bool:
        """Whether a stream has told a part of the answer: comments and the start come before."""
        return self.read.count(b"\n") > 8

    def wait(self) -> None:
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()

    @property
    def error(self) -> dict[str, Any]:
        """What the answer says in place of its end: code and type where its API has them, and the message."""
        text = self.read.decode()
        assert APIS[self.path][1] not in text.replace(" ", ""), text[-500:]
        last = next(line for line in reversed(text.splitlines()) if line.strip())
        answer = json.loads(last.removeprefix("data: "))
        if self.path.startswith("/api/"):
            assert answer.keys() == {"error"}
            return {"message": answer["error"]}
        if self.path == "/v1/messages":
            assert answer["type"] == "error"
        if self.path == "/v1/responses" and answer.get("type") == "error":
            return dict(answer)
        return dict(answer["error"])

    def _read(self) -> None:
        with suppress(OSError, http.client.HTTPException):  # it is closed
            answer = self._connection.getresponse()
            self.status = answer.status
            while part := answer.read1(65536):
                self.read += part
        self._connection.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_endless_model(tmp_path_factory.mktemp("endless") / "one.gguf")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with running("-m", str(model), "--n-ctx", str(N_CTX)) as server:
        yield server


@each_api
@whole_and_streamed
def test_a_client_that_goes_ends_its_work(server: Server, path: str, stream: bool) -> None:
    asking = Asking(server, path, stream)
    wait_for(lambda: server.stats()["requests"]["running"] == 1)
    wait_for(lambda: asking.has_begun or not stream)
    asking.leave()
    now = server.wait_until_idle()
    assert all(seq["state"] != "running" for seq in now["sequences"])
    assert now["recent"][0]["finish_reason"] == "abort"


@pytest.fixture(scope="module")
def hasty(model: Path) -> Iterator[Server]:
    with running("-m", str(model), "--n-ctx", str(N_CTX), "--request-timeout", "1") as server:
        yield server


@each_api
@whole_and_streamed
def test_an_answer_whose_time_is_over_is_cut_off(hasty: Server, path: str, stream: bool) -> None:
    def is_cut_off() -> bool:
        """In the stream, if that had begun."""
        asking = Asking(hasty, path, stream)
        asking.wait()
        assert asking.error["message"] == "the request took more than 1 seconds and was given up"
        if not path.startswith("/api/") and (path != "/v1/responses" or not stream):
            assert asking.error["type"] == "timeout_error"
        assert asking.status == 504 or (stream and asking.status == 200)
        assert all(seq["state"] != "running" for seq in hasty.wait_until_idle()["sequences"])
        return asking.status == (200 if stream else 504)

    wait_for(is_cut_off)


@pytest.fixture(scope="module")
def stopped(model: Path) -> dict[tuple[str, bool], Asking]:
    """What every API says, whole and as a stream, when its server is stopped in the middle."""
    options = ("--parallel", str(2 * len(APIS)), "--drain-timeout", "0.2")
    with running("-m", str(model), "--n-ctx", str(N_CTX), *options) as server:
        asked = {(path, stream): Asking(server, path, stream) for path in APIS for stream in (True, False)}
        wait_for(lambda: server.stats()["requests"]["running"] == len(asked))
        wait_for(lambda: all(each.has_begun for (_, stream), each in asked.items() if stream))
        assert server.stop(signal.SIGTERM) == 0
        for each in asked.values():
            each.wait()
    return asked


@each_api
@whole_and_streamed
def test_a_server_that_stops_cuts_off_what_takes_too_long(
    stopped: dict[tuple[str, bool], Asking], path: str, stream: bool
) -> None:
    asking = stopped[path, stream]
    assert asking.status == (200 if stream else 503)
    assert "shutting down" in asking.error["message"]
    if not path.startswith("/api/"):
        assert asking.error["code"] == "shutting_down"


ANNA, BEN = KEYS
SHORT = {"model": "one", "prompt": "x", "max_tokens": 1}


@pytest.fixture(scope="module", params=["one model", "router"])
def keyed(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path]]:
    """A server of two tenants, and the folder of its file of keys."""
    folder = tmp_path_factory.mktemp("removed")
    copy = shutil.copy(model, folder / "one.gguf")
    options = ["--n-ctx", str(N_CTX), "--parallel", "4", "-m", f"one={copy}"]
    if request.param == "router":
        options += ["--keep-alive", "1h"]
    keys = key_file(folder, f"anna:{ANNA}", f"ben:{BEN}")
    with running(*options, "--api-key-file", str(keys)) as server:
        yield server, folder


@each_api
@whole_and_streamed
def test_a_key_that_is_removed_ends_what_runs_with_it(
    keyed: tuple[Server, Path], path: str, stream: bool
) -> None:
    """And nobody else's."""
    server, folder = keyed
    removed, kept = Asking(server, path, stream, ANNA), Asking(server, path, True, BEN)
    wait_for(lambda: server.stats(BEN).get("requests", {}).get("running") == 2)
    wait_for(lambda: kept.has_begun and (removed.has_begun or not stream))
    key_file(folder, f"ben:{BEN}")
    server.process.send_signal(signal.SIGHUP)
    try:
        removed.wait()
        assert removed.error["message"].startswith("the key of this request was removed")
        assert removed.status == (200 if stream else 401)
        n = len(kept.read)
        wait_for(lambda: len(kept.read) > n)
        assert kept.thread.is_alive()
        assert server.status("POST", "/v1/completions", SHORT, key=ANNA) == 401
    finally:
        kept.leave()
        removed.leave()
        key_file(folder, f"anna:{ANNA}", f"ben:{BEN}")
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: server.status("POST", "/v1/completions", SHORT, key=ANNA) == 200)
        wait_for(lambda: server.stats(BEN)["requests"]["running"] == 0)
