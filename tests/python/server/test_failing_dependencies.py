"""What a server stands on fails: Redis stops, the disk is full, the folder is deleted, the clock jumps.

What was reported as stored stays, and afterwards everything is as before.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from support.patience import PATIENCE
from support.servers.remote import redis_server
from support.servers.server import Server, running

pytestmark = pytest.mark.full

DAY = 86400.0
_CLOCK = """
import os, time
_real = time.time
def _stepped():
    with open(os.environ["TEST_CLOCK"]) as file:
        return _real() + float(file.read() or 0)
time.time = _stepped
"""


@pytest.mark.needs("redis", "root")
@pytest.mark.nightly
def test_half_a_minute(tmp_path: Path) -> None:
    soak(tmp_path, rounds=1, pause=1.0)


@pytest.mark.needs("redis", "root")
@pytest.mark.bench
def test_ten_minutes(tmp_path: Path) -> None:
    seconds = float(os.environ.get("MIXEDKV_OUTAGE_SECONDS", "600"))
    soak(tmp_path, rounds=max(1, round(seconds / 40)), pause=4.0)


def soak(folder: Path, *, rounds: int, pause: float) -> None:
    clock = folder / "clock"
    clock.write_text("0")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(_CLOCK)
    path = os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])
    environ = {"PYTHONPATH": path, "TEST_CLOCK": str(clock)}
    with (
        redis_server(folder, "--unixsocket", str(folder / "redis.sock")) as (redis, _),
        small_disk(folder / "disk") as disk,
    ):
        options = (
            "--n-ctx",
            "2048",
            "--model-name",
            "m",
            "--request-timeout",
            "20",
            "--store",
            str(disk / "kv"),
            "--max-ram-gb",
            "0.005",
            "--metadata-url",
            f"unix://{folder / 'redis.sock'}",
        )
        with running(*options, environ=environ) as server:
            clients = Clients(server)
            clients.run(pause)

            def stop_redis() -> None:
                redis.send_signal(signal.SIGSTOP)

            def continue_redis() -> None:
                redis.send_signal(signal.SIGCONT)

            outages: list[Callable[[], None]] = [
                lambda: during(stop_redis, pause, continue_redis),
                lambda: during(lambda: fill(disk), pause, (disk / "filler").unlink),
                lambda: shutil.rmtree(disk / "kv", ignore_errors=True),
                lambda: during(lambda: step(clock, DAY), pause, lambda: step(clock, -DAY)),
                lambda: step(clock, 0),
            ]
            idle = server.resident_mib
            with clients:
                for _ in range(rounds):
                    for outage in outages:
                        outage()
                        time.sleep(pause)
            print(*sorted(clients.statuses.items()), sep="\n")
            assert set(clients.statuses) <= {200, 201, 429, 503, 504}
            assert clients.surprises == []
            assert clients.statuses[201] > 0
            server.wait_until_idle()
            assert server.status("GET", "/ready") == 200
            for session, version in clients.sessions.items():
                status, found, _ = server.request("GET", f"/v1/context/{session}")
                assert status == 200, session
                assert found["version"] >= version
            clients.ask("the last one, which is to be stored", 1)
            assert server.wait_until_idle()["store"]["n_entries"] > 0
            print(f"{len(clients.sessions)} sessions; resident MiB: {idle:.0f}, {server.resident_mib:.0f}")
            assert server.resident_mib < idle + 150
            assert "Traceback" not in server.log
            assert server.log.count("the disk is full") <= rounds + 1
            assert server.stop() == 0


class Clients:
    """Three threads that chat, and make sessions that grow. `sessions` has those that were reported as made,
    with the turns that were.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self.statuses: Counter[int] = Counter()
        self.sessions: dict[str, int] = {}
        self.surprises: list[str] = []
        self._stop = threading.Event()
        self._numbers = itertools.count()

    def __enter__(self) -> Clients:
        self._stop.clear()
        self._threads = [threading.Thread(target=self._work) for _ in range(3)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)

    def run(self, seconds: float) -> None:
        with self:
            time.sleep(seconds)

    def ask(self, text: str, no: int, **more: Any) -> int:
        messages = [{"role": "user", "content": f"{text} {no} " * 20}]
        status, answer, headers = self._server.request(
            "POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 8, **more}
        )
        self.statuses[status] += 1
        if status == 200 and "session_id" in more:
            self.sessions[more["session_id"]] = int(headers["x-session-version"])
        if status == 404:
            self.surprises.append(f"{more}: {answer}")
        return status

    def _work(self) -> None:
        while not self._stop.is_set():
            no = next(self._numbers)
            self.ask("Once upon a time", no)
            session = f"s{no}"
            body = {"model": "m", "prompt": None, "session_id": session, "ttl": int(30 * DAY)}
            body["messages"] = [{"role": "system", "content": f"Be number {no}. " * 10}]
            status, _, _ = self._server.request("POST", "/v1/context", body)
            self.statuses[status] += 1
            if status == 201:
                self.sessions[session] = 0
                for turn in range(2):
                    self.ask("And then", turn, session_id=session, append=True)
            time.sleep(0.05)


def during(begin: Callable[[], Any], seconds: float, end: Callable[[], Any]) -> None:
    begin()
    try:
        time.sleep(seconds)
    finally:
        end()


def step(clock: Path, seconds: float) -> None:
    """Atomically: the server reads it all the time."""
    new = clock.with_name("new")
    new.write_text(str(seconds))
    new.rename(clock)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 14))


@contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here: run it as root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
