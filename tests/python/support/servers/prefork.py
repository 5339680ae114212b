"""Programs of mixedkv that start without importing it again: a process that has imported it forks for each.
That saves nine tenths of what `python -m mixedkv serve` takes to start; all else is as there.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from tempfile import TemporaryFile
from typing import IO

from support import TESTS
from support.patience import PATIENCE

_IMPORTED = ("mixedkv.cli", "mixedkv_server.serve", "mixedkv.sessions.metadata_sqlite", "gguf")


def run(arguments: Sequence[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Return what `python -m mixedkv` does with the arguments."""
    with TemporaryFile("w+", encoding="utf-8") as given, TemporaryFile("w+", encoding="utf-8") as out:
        given.write(stdin)
        given.seek(0)
        process = Forked(arguments, os.environ, (given.fileno(), out.fileno()))
        errors = process.stderr.read()
        code = process.wait(PATIENCE)
        out.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), errors)


class Forked:
    """As subprocess.Popen; its stderr is a pipe, its stdin and stdout are `files` or this one's."""

    def __init__(
        self, arguments: Sequence[str], environ: Mapping[str, str], files: Sequence[int] = ()
    ) -> None:
        self.args = list(arguments)
        self.returncode: int | None = None
        errors, errors_in = os.pipe()
        status, status_in = os.pipe()
        request = json.dumps({"argv": self.args, "environ": dict(environ), "folder": os.getcwd()})
        socket.send_fds(_parent(), [request.encode()], [errors_in, status_in, *files])
        os.close(errors_in)
        os.close(status_in)
        self.stderr: IO[str] = os.fdopen(errors, encoding="utf-8", errors="replace")
        self._status = os.fdopen(status, "rb", buffering=0)
        self.pid = int(self._status.read(16))

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = int(self._status.read(16))
            self._status.close()
        return self.returncode


@cache
def _parent() -> socket.socket:
    """Start the process that forks; it ends with this one."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environ = {**os.environ, "PYTHONPATH": str(TESTS)}
    process = subprocess.Popen(
        [sys.executable, "-m", "support.servers.prefork", str(its.fileno())],
        pass_fds=[its.fileno()],
        env=environ,
    )
    its.close()
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


def _fork_for_each(requests: socket.socket) -> Iterator[tuple[list[str], dict[str, str], str]]:
    """Fork for each request, and say how each process ends; yields in the child alone."""
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's, which is meant for pytest
    running: dict[int, int] = {}
    while True:
        for ready in select.select([requests.fileno(), woken], [], [])[0]:
            if ready == woken:
                os.read(woken, 4096)
                continue
            data, files, _, _ = socket.recv_fds(requests, 1 << 20, 4)
            if not data:
                return
            errors, status, *others = files
            if pid := os.fork():
                for file in (errors, *others):
                    os.close(file)
                os.write(status, b"%16d" % pid)
                running[pid] = status
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            requests.close()
            for file in (woken, wakes, status, *running.values()):
                os.close(file)
            for number, file in ((2, errors), *enumerate(others)):
                os.dup2(file, number)
                os.close(file)
            request = json.loads(data)
            yield request["argv"], request["environ"], request["folder"]
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                status = running.pop(ended[0])
                with suppress(BrokenPipeError):
                    os.write(status, b"%16d" % os.waitstatus_to_exitcode(ended[1]))
                os.close(status)


def main() -> None:
    for name in _IMPORTED:
        with suppress(ModuleNotFoundError):  # of the server, where the core is installed alone
            importlib.import_module(name)
    child = next(_fork_for_each(socket.socket(fileno=int(sys.argv[1]))), None)
    if child is None:
        return
    arguments, environ, folder = child
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.argv = ["mixedkv", *arguments]
    sys.exit(importlib.import_module("mixedkv.cli").main())


if __name__ == "__main__":
    main()
