"""All attacks at once, with honest clients beside them: the server lives, small, and still answers these."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.children import honest_child
from support.clients.hostile_clients import Hostile
from support.patience import PATIENCE
from support.servers.server import Server, key_file, running

pytestmark = pytest.mark.nightly

HONEST, EVIL = "honest-key-0123456789", "evil-key-0123456789012"
MOST_MIB = 300
OPTIONS = (
    "--model-name",
    "m",
    "--n-ctx",
    "4096",
    "--parallel",
    "8",
    "--embeddings",
    "--request-timeout",
    "60",
    "--max-ram-gb",
    "0.03",  # the store's share, which honest prompts fill
)


def test_a_few_seconds(tmp_path: Path) -> None:
    attack(tmp_path, quiet=3, seconds=15, n_requests=60, n_threads=4)


@pytest.mark.bench
def test_five_minutes(tmp_path: Path) -> None:
    """MIXEDKV_ATTACK_PAUSE=0: as many requests as the machine can send, which the clients share with it."""
    seconds = float(os.environ.get("MIXEDKV_ATTACK_SECONDS", "300"))
    pause = float(os.environ.get("MIXEDKV_ATTACK_PAUSE", "0.14"))
    quiet, beside = attack(tmp_path, quiet=30, seconds=seconds, n_requests=2000, n_threads=12, pause=pause)
    assert percentile(beside["gaps"]) <= 3 * percentile(quiet["gaps"])


def attack(
    folder: Path, *, quiet: float, seconds: float, n_requests: int, n_threads: int, pause: float = 0.0
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What honest clients saw before, and beside hostile ones."""
    keys = key_file(folder, f"honest:{HONEST}", f"evil:{EVIL} session_mb=5 disk_mb=50")
    options = (*OPTIONS, "--api-key-file", str(keys), "--store", str(folder / "store"))
    with running(*options) as server:
        # what is allocated once; a large body starts the process that reads them
        honest(server, min(3.0, quiet)).communicate(timeout=PATIENCE)
        assert server.status("POST", "/v1/completions", {"prompt": "x" * 100_000}, key=HONEST) == 400
        child = honest(server, quiet)
        before = result(child)
        idle = server.resident_mib
        hostile = Hostile(server.port, EVIL, n_threads, pause)
        child = honest(server, seconds)
        memory: list[float] = []
        hostile.run(seconds, n_requests, lambda: memory.append(server.resident_mib))
        beside = result(child)
        report(before, beside, hostile, idle, memory)

        assert server.process.poll() is None, server.log
        assert {status for _, status in hostile.counts} <= {0, 200, 201, 400, 401, 408, 413, 429, 503, 504}
        assert set(beside["statuses"]) == {"200"}
        assert max(memory) < idle + MOST_MIB
        assert "Traceback" not in server.log
        assert server.status("GET", "/health") == 200
        assert server.stop(signal.SIGTERM) == 0
    return before, beside


def honest(server: Server, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(honest_child.__file__)), str(server.port), HONEST, "4", str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def result(child: subprocess.Popen[str]) -> dict[str, Any]:
    text, _ = child.communicate(timeout=1200)
    return dict(json.loads(text))


def percentile(values: list[float], q: float = 0.99) -> float:
    return sorted(values)[int(q * (len(values) - 1))]


def report(
    before: dict[str, Any], beside: dict[str, Any], hostile: Hostile, idle: float, memory: list[float]
) -> None:
    for name, count in sorted(hostile.counts.items()):
        print(*name, count)
    print(f"{hostile.n} hostile requests; resident MiB: idle {idle:.0f}, most {max(memory):.0f}")
    for name, seen in (("quiet", before), ("beside", beside)):
        print(
            f"{name}: {len(seen['gaps'])} tokens, p50 {percentile(seen['gaps'], 0.5) * 1000:.1f} ms, "
            f"p99 {percentile(seen['gaps']) * 1000:.1f} ms; first token p50 "
            f"{percentile(seen['firsts'], 0.5) * 1000:.0f} ms, p99 {percentile(seen['firsts']) * 1000:.0f} ms"
        )
