"""What docs/many-machines.md has a newcomer type."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.patience import PATIENCE, wait_for
from support.servers.remote import listens

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'mixedkv[ray]'")
pytestmark = pytest.mark.slow
PORT = 8000  # `serve run` takes no other
SLOW = {  # Ray's own limits are for machines that have nothing else to do
    "RAY_worker_niceness": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(PATIENCE),
    "RAY_ADDRESS": "local",  # not to a cluster of another test
    "RAY_USAGE_STATS_ENABLED": "0",
}


def documented() -> str:
    """The second of the two commands."""
    lines = (Path(__file__).parents[3] / "docs/many-machines.md").read_text().splitlines()
    return lines[lines.index("pip install 'mixedkv[ray]'") + 1]


@contextmanager
def typed(command: str, log: Path, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """In a shell; ended as Ctrl-C does."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MIXEDKV_", "RAY_"))}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            stdout=file,
            stderr=file,
            env={**env, **SLOW, **environ},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        try:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def ask() -> dict[str, Any] | None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"http://localhost:{PORT}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found
    except (urllib.error.URLError, ConnectionError):  # not there yet
        return None


def test_serve_run_answers(tmp_path: Path) -> None:
    if listens(PORT):
        pytest.skip(f"port {PORT} is taken")
    log, answers = tmp_path / "log", []
    with typed(documented(), log, MIXEDKV_THREADS="1") as process:
        wait_for(lambda: answers.append(ask()) or answers[-1] or process.poll() is not None, pause=0.5)
        assert process.poll() is None, log.read_text()[-3000:]
        assert answers[-1] is not None
        assert answers[-1]["usage"]["completion_tokens"] == 4
    wait_for(lambda: not listens(PORT), pause=0.1)


def test_serve_run_says_what_is_wrong(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with typed(documented(), log, MIXEDKV_STORE_REMOTE="ftp://x") as process:
        assert process.wait(PATIENCE) != 0
    assert "ValueError: remote: 'ftp' is not the URL of a remote: use redis://" in log.read_text()
