"""64 clients that do everything wrong: the server stays as it was."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from support.clients import soak_clients
from support.clients.soak_clients import KEYS, Clients
from support.patience import wait_for
from support.servers.server import Server, key_file, running

pytestmark = pytest.mark.full

N_CLIENTS = 64
N_CTX = 2048
PARALLEL = 4
IDLE = 4


@pytest.mark.nightly
def test_a_few_seconds(tmp_path: Path) -> None:
    soak(tmp_path, seconds=5)


@pytest.mark.bench
def test_three_minutes(tmp_path: Path) -> None:
    soak(tmp_path, seconds=float(os.environ.get("MIXEDKV_SOAK_SECONDS", "180")))


def soak(folder: Path, seconds: float) -> None:
    options = [
        "--model-name",
        soak_clients.MODEL,
        "--n-ctx",
        str(N_CTX),
        "--parallel",
        str(PARALLEL),
        "--idle-prefixes",
        str(IDLE),
        "--max-queue",
        "32",
        "--max-body-mb",
        str(soak_clients.MAX_BODY / 1e6),
        "--request-timeout",
        "10",
        "--store",
        str(folder / "store"),
        "--max-kv-size-gb",
        "0.02",
        "--max-ram-gb",
        "0.005",
        "--api-key-file",
        str(key_file(folder, f"a:{KEYS[0]}", f"b:{KEYS[1]}")),
    ]
    with running(*options) as server:
        Clients(server.port, N_CLIENTS, seed=1).run(min(3, seconds), lambda: None)  # what is allocated once
        wait_until_idle(server)
        n_files = count_files(server)
        memory: list[float] = []
        clients = Clients(server.port, N_CLIENTS)
        clients.run(seconds, lambda: memory.append(server.resident_mib))
        print(*sorted(clients.counts.items(), key=str), sep="\n")
        print("resident MiB:", *(f"{size:.0f}" for size in memory[:: max(1, len(memory) // 40)]))

        assert server.process.poll() is None, server.log
        assert clients.surprises == []
        assert clients.has_tried_all
        assert any(status == 200 for _, status in clients.counts)
        wait_until_idle(server)
        all_of_the_context_can_be_used(server)
        wait_for(lambda: count_files(server) <= n_files + 8)
        assert is_flat(memory), memory
        assert "Traceback" not in server.log
        assert server.stop(signal.SIGTERM) == 0


def wait_until_idle(server: Server) -> None:
    """Nothing runs, nothing waits, and no sequence is held for an answer that nobody gets."""
    stats = server.wait_until_idle(KEYS[0])
    assert stats["cache"]["sequences_running"] == 0
    assert stats["cache"]["sequences_idle"] <= PARALLEL + IDLE
    assert stats["cache"]["cells_used"] <= N_CTX


def all_of_the_context_can_be_used(server: Server) -> None:
    """A prompt that needs every cell gets them, and as it is to leave nothing, none is in use then."""
    n = N_CTX - 2
    body: dict[str, Any] = {"prompt": [5] * n, "max_tokens": 1, "ignore_eos": True, "use_kv_cache": False}
    usage = server.post("/v1/completions", body, key=KEYS[0])["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (n, 1)
    wait_until_idle(server)
    stats = server.stats(KEYS[0])
    assert stats["cache"]["cells_used"] == 0
    assert stats["sequences"] == []


def count_files(server: Server) -> int:
    """Open files and sockets."""
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def is_flat(memory: list[float]) -> bool:
    """What an allocator, a store's tables and compiled templates take grows for the first half minute."""
    if len(memory) < 60:
        return memory[-1] < memory[0] + 64
    third = len(memory) // 3
    return max(memory[-third:]) < max(memory[third:-third]) * 1.05
