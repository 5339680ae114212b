"""Signals at any moment: SIGHUP never ends a server; SIGTERM ends it in order, or at once while it loads."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from mixedkv._signals import starts_server
from mixedkv.bundled import model_path
from support.clients.raw_http import KEYS, SHORT
from support.patience import PATIENCE, wait_for
from support.servers import split_servers
from support.servers.server import Server, children, key_file

pytestmark = pytest.mark.full

ANNA, BEN = KEYS
SMALL = ("--n-ctx", "512", "--parallel", "2")
KINDS = ["one model", "router", "split"]


@pytest.mark.parametrize(
    "words",
    [
        "python -m mixedkv serve -m x",
        "/usr/bin/python3 /usr/local/bin/mixedkv serve",
        "python -X importtime -m mixedkv split serve body",
        "python -m mixedkv_server -m x",
        "python -m mixedkv_server.model_child one",
    ],
)
def test_what_starts_a_server_is_known_before_anything_is_imported(words: str) -> None:
    assert starts_server(words.split())


@pytest.mark.parametrize(
    "words",
    [
        "python",
        "python -c pass",
        "python -m mixedkv run serve",
        "python -m mixedkv split run",
        "python serve",
    ],
)
def test_other_programs_are_left_alone(words: str) -> None:
    assert not starts_server(words.split())


def test_a_hangup_is_remembered_until_it_can_be_followed() -> None:
    program = """
import os, signal
from mixedkv._signals import remember_hangups
from mixedkv_service.signals import reloading_at_hangup
remember_hangups()
os.kill(os.getpid(), signal.SIGHUP)
print("held", flush=True)
with reloading_at_hangup(lambda: print("read again", flush=True)):
    os.kill(os.getpid(), signal.SIGHUP)
os.kill(os.getpid(), signal.SIGHUP)
print("ends", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split("\n") == ["held", "read again", "read again", "ends", ""], done.stderr
    assert done.returncode == 0


# --- real servers, which import and load ---


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("signals")
    keys = ["--api-key-file", str(key_file(folder, f"anna:{ANNA}"))]
    copy = shutil.copy(model_path(), folder / "one.gguf")
    warm = folder / "warm.jsonl"
    warm.write_text('{"prompt": "The lamp", "tenant": "anna"}\n')
    body = split_servers.split(model_path(), folder).body
    serve = ["-m", "mixedkv", "serve", "--port", "0", "--threads", "1", *SMALL, *keys]
    return {
        "one model": serve,
        "router": [*serve, "-m", str(copy), "--keep-alive", "5m", "--warm", str(warm)],
        "split": ["-m", "mixedkv", "split", "serve", str(body), "--port", "0", "--threads", "1", *keys],
    }


@contextmanager
def started(command: Sequence[str], folder: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A process of its own, whose temporary files are in a folder, and the lines of its log."""
    environ = {**os.environ, "TMPDIR": folder}
    process = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True, env=environ)
    lines: list[str] = []
    assert process.stderr is not None
    reader = threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        yield process, lines
    finally:
        process.kill()
        process.wait()
        reader.join(PATIENCE)


def holds_hangup(pid: int) -> bool:
    """Whether a process blocks SIGHUP, or has a function for it."""
    text = Path(f"/proc/{pid}/status").read_text()
    return any(int(mask, 16) & 1 for mask in re.findall(r"^Sig(?:Blk|Cgt):\s*(\w+)$", text, re.M))


def send(process: subprocess.Popen[str], number: int) -> None:
    for pid in (process.pid, *children(process.pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.mark.parametrize("kind", KINDS)
def test_hangups_from_the_first_line_to_the_last_end_nothing(
    commands: dict[str, list[str]], kind: str
) -> None:
    """Every 20 ms, while it imports, loads, serves, drains and closes; also the processes of models."""
    with TemporaryDirectory() as folder, started(commands[kind], folder) as (process, lines):
        wait_for(lambda: process.poll() is not None or holds_hangup(process.pid), pause=0.001)
        assert not lines

        def has_started() -> bool:
            send(process, signal.SIGHUP)
            said = "was loaded in" if kind == "router" else " on "
            return process.poll() is not None or any(said in line for line in lines)

        wait_for(has_started, pause=0.02)
        for _ in range(20):
            send(process, signal.SIGHUP)
            time.sleep(0.02)
        assert process.poll() is None, "".join(lines)
        process.send_signal(signal.SIGTERM)

        def has_ended() -> bool:
            send(process, signal.SIGHUP)
            return process.poll() is not None

        wait_for(has_ended, pause=0.005)
        assert process.returncode == 0, "".join(lines)
        assert not os.listdir(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.nightly
def test_an_end_while_it_starts_is_quick_and_leaves_nothing(
    commands: dict[str, list[str]], kind: str, number: int, share: float
) -> None:
    """At several moments of a start, whose length is measured first."""
    seconds = share * seconds_to_start(commands[kind], kind)
    with TemporaryDirectory() as folder, started(commands[kind], folder) as (process, lines):
        wait_for(lambda: holds_hangup(process.pid), pause=0.001)
        time.sleep(seconds)
        pids = [*children(process.pid)]
        process.send_signal(number)
        began = time.monotonic()
        code = process.wait(PATIENCE)
        assert time.monotonic() - began < 20
        assert code in (0, -number, 130, 143), "".join(lines)
        assert "Traceback" not in "".join(lines)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        assert not os.listdir(folder)


_seconds: dict[str, float] = {}


def seconds_to_start(command: Sequence[str], kind: str) -> float:
    if kind not in _seconds:
        with TemporaryDirectory() as folder, started(command, folder) as (process, lines):
            wait_for(lambda: holds_hangup(process.pid), pause=0.001)
            began = time.monotonic()
            wait_for(lambda: any(" on " in line for line in lines))
            _seconds[kind] = time.monotonic() - began
    return _seconds[kind]


def test_a_server_without_keys_says_that_there_is_nothing_to_read() -> None:
    server = Server(*SMALL)
    try:
        server.wait_until_ready()
        server.process.send_signal(signal.SIGHUP)
        server.wait_for_log("no keys and no certificate to read again")
        assert server.status("POST", "/v1/completions", SHORT) == 200
        assert server.stop() == 0
    finally:
        server.stop(signal.SIGKILL)
