"""Servers that stores share: Redis and S3 as they are, and a line to them that can be disturbed."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from support.patience import PATIENCE, wait_for

BUCKET = "mixedkv-tests"
PATIENT: dict[str, object] = {"timeout": 20}  # of tests that are not about it: a machine may be slow


@contextmanager
def redis_server(folder: Path, *options: str, port: int = 0) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server that keeps nothing, and its port."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    assert program, 'no redis-server on the path: a test that needs it has pytest.mark.needs("redis")'
    port = port or free_port()
    command = [program, "--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(folder)]
    server = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: listens(port) or server.poll() is not None)
        assert server.poll() is None, "redis-server ended at once"
        yield server, port
    finally:
        server.kill()
        server.wait(PATIENCE)


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a server with one bucket, which takes any credentials."""
    import httpx
    from moto.server import ThreadedMotoServer

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        httpx.post(f"http://127.0.0.1:{port}/moto-api/reset", timeout=PATIENCE).raise_for_status()
        httpx.put(f"http://127.0.0.1:{port}/{BUCKET}", timeout=PATIENCE).raise_for_status()
        yield port
    finally:
        server.stop()


def redis_url(port: int, **options: object) -> str:
    extra = "&".join(f"{name}={value}" for name, value in (PATIENT | options).items())
    return f"redis://127.0.0.1:{port}/0?{extra}"


def s3_url(port: int, bucket: str = BUCKET, **options: object) -> str:
    extra = "".join(f"&{name}={value}" for name, value in options.items())
    return f"s3://{bucket}/some/prefix?endpoint=http://127.0.0.1:{port}&region=us-east-1{extra}"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def free_ports(n: int) -> int:
    """Return the first of `n` free ports in a row, below those that the system gives to connections."""
    while True:
        first = random.randrange(20_000, 32_000)
        try:
            for port in range(first, first + n):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


class Line:
    """Passes bytes between a port of its own and another, in the way that `mode` says: "open"; "silent",
    which takes everything and answers nothing; "slow", a few bytes at a time; or "cut", which hangs up in the
    middle of an answer.
    """

    def __init__(self, port: int) -> None:
        self.mode, self._to = "open", port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for one in [self._listening, *self._open]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listening.accept()
                try:
                    there = socket.create_connection(("127.0.0.1", self._to))
                except OSError:  # nobody is there: as if the line were cut
                    here.close()
                    continue
                self._open += [here, there]
                for ends in ((here, there, False), (there, here, True)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if is_answer and self.mode == "silent":
                    continue
                if is_answer and self.mode == "cut":
                    target.sendall(data[: len(data) // 2])
                    target.shutdown(socket.SHUT_RDWR)
                    return
                while is_answer and self.mode == "slow" and data:
                    target.sendall(data[:16])
                    data = data[16:]
                    time.sleep(0.05)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
