"""A key that is removed with SIGHUP: what runs with it ends with an error, and other keys' answers go on."""

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

from mixedkv.bundled import model_path
from support.clients.raw_http import CHAT, KEYS, SHORT
from support.patience import PATIENCE, wait_for
from support.servers.server import Server, key_file, running

pytestmark = pytest.mark.full

ANNA, BEN = KEYS
TEXT = {"prompt": "x", "max_tokens": 100_000, "ignore_eos": True, "overflow": "slide", "model": "one"}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": TEXT,
    "/v1/chat/completions": {**TEXT, "messages": CHAT},
    "/completion": {**TEXT, "n_predict": 100_000},
}


class Asking:
    """A request whose answer a thread reads."""

    def __init__(self, server: Server, key: str, path: str, stream: bool) -> None:
        self.status, self.read = 0, b""
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        self._connection.request("POST", path, json.dumps({**ASKED[path], "stream": stream}), headers)
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def leave(self) -> None:
        if (sock := self._connection.sock) is not None:
            sock.shutdown(socket.SHUT_RDWR)
        self.thread.join(PATIENCE)

    def _read(self) -> None:
        answer = self._connection.getresponse()
        self.status = answer.status
        with suppress(OSError, http.client.HTTPException):  # it is closed
            while part := answer.read1(65536):
                self.read += part
        self._connection.close()


@pytest.fixture(scope="module", params=["one model", "router"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("removed")
    copy = shutil.copy(model_path(), folder / "one.gguf")
    options = ["--n-ctx", "1024", "--parallel", "4", "-m", f"one={copy}", "--overflow", "slide"]
    if request.param == "router":
        options += ["--keep-alive", "1h"]
    keys = key_file(folder, f"anna:{ANNA}", f"ben:{BEN}")
    with running(*options, "--api-key-file", str(keys)) as server:
        yield server, folder


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ASKED)
def test_what_runs_with_a_removed_key_ends_with_an_error(
    served: tuple[Server, Path], path: str, stream: bool
) -> None:
    server, folder = served
    removed = Asking(server, ANNA, path, stream)
    kept = Asking(server, BEN, path, True)
    wait_for(lambda: server.stats(BEN).get("requests", {}).get("running") == 2)
    wait_for(lambda: kept.read and (removed.read or not stream))
    key_file(folder, f"ben:{BEN}")
    server.process.send_signal(signal.SIGHUP)
    try:
        removed.thread.join(60)
        assert not removed.thread.is_alive()
        assert b"the key of this request was removed" in removed.read[-1000:], removed.read[-1000:]
        assert removed.status == (200 if stream else 401)
        n = len(kept.read)
        wait_for(lambda: len(kept.read) > n)
        assert kept.thread.is_alive()
        assert server.status("POST", "/v1/completions", {**SHORT, "model": "one"}, key=ANNA) == 401
    finally:
        kept.leave()
        removed.leave()
        key_file(folder, f"anna:{ANNA}", f"ben:{BEN}")
        server.process.send_signal(signal.SIGHUP)
        body = {**SHORT, "model": "one"}
        wait_for(lambda: server.status("POST", "/v1/completions", body, key=ANNA) == 200)
