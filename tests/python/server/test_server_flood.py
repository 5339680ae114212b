"""18 tenants, of which one floods the server with each attack in turn: the others hardly notice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support import TESTS
from support.children import flood_child
from support.patience import wait_for
from support.servers.server import Server, key_file, running

pytestmark = pytest.mark.full

N_HONEST, CONNECTIONS = 17, 32
HONEST = [f"t{i:02}-key-0123456789abcdef" for i in range(N_HONEST)]
FLOOD = "flood-key-0123456789abcdef"
MOST_TIMES = 3.0
WARM = 5.0  # seconds until all tenants have begun
OPTIONS = ("--n-ctx", "4096", "--embeddings", "--model-name", "m", "--request-timeout", "60")
OPTIONS += ("--max-ram-gb", "0.1")  # the store is full before the attacks begin


def start(module: str, *arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"support.children.{module}", *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=TESTS)


def percentile(values: list[float], q: float = 0.99) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


def soak(folder: Path, alone: float, each: float, names: list[str]) -> float:
    """How many times as long the slowest honest requests take beside the attacks as before all of them: what
    an attack began may go on behind it.
    """
    lines = [f"t{i:02}:{key}" for i, key in enumerate(HONEST)]
    keys = key_file(folder, *lines, f"flood:{FLOOD} session_mb=5 disk_mb=50")
    memory: list[float] = []
    times: list[tuple[float, str]] = []
    with running(*OPTIONS, "--api-key-file", str(keys), "--store", str(folder / "store")) as server:
        server.status("POST", "/v1/completions", {"prompt": "x" * 100_000}, key=FLOOD)  # starts processes
        honest = start("tenants_child", server.port, *HONEST)
        time.sleep(WARM)
        times.append((time.monotonic(), ""))
        time.sleep(alone)
        for name in names:
            times.append((time.monotonic(), name))
            flood = start("flood_child", server.port, FLOOD, CONNECTIONS, each, name)
            counts = json.loads(flood.communicate(timeout=400)[0])
            memory.append(server.own_resident_mib)
            print(f"{name}: {counts}, {memory[-1]:.0f} MiB, all {server.resident_mib:.0f}", flush=True)
        seen = json.loads(honest.communicate(timeout=400)[0])
        ratio = report(by_attack(times, seen))
        check_server(server, seen, memory)
    return ratio


def by_attack(times: list[tuple[float, str]], seen: list[Any]) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for _, name in times}
    for began, first, whole, _ in (each for each in seen if each[0] >= times[0][0]):
        name = next(name for at, name in reversed(times) if at <= began)
        found[name].append((first, whole))
    return found


def check_server(server: Server, seen: list[Any], memory: list[float]) -> None:
    """Nothing hangs, nothing was refused, and nothing is left."""
    assert server.process.poll() is None, server.log[-3000:]
    assert Counter(status for *_, status in seen).keys() == {200}
    assert "Traceback" not in server.log
    wait_for(lambda: server.stats(HONEST[0])["requests"]["running"] == 0)
    assert max(memory) < memory[0] + 400, memory  # with the bodies of requests at work
    assert server.own_resident_mib < memory[0] + 250, memory
    assert server.stop(signal.SIGTERM) == 0


def report(found: dict[str, list[tuple[float, float]]]) -> float:
    """Print the times beside each attack. Return the 99th percentile beside all, by that alone."""
    alone = [whole for _, whole in found[""]]
    beside = [whole for name, seen in found.items() if name for _, whole in seen]
    for name, seen in found.items():
        first, whole = ([one[i] for one in seen] for i in (0, 1))
        print(
            f"{name or 'alone':32} n {len(seen):4}, first token p50 {percentile(first, 0.5):6.3f} p99 "
            f"{percentile(first):6.3f}, whole p50 {percentile(whole, 0.5):6.3f} p99 {percentile(whole):6.3f}"
        )
    ratio = percentile(beside) / percentile(alone)
    print(f"p99 alone {percentile(alone):.3f}, beside attacks {percentile(beside):.3f}: {ratio:.2f} times")
    return ratio


@pytest.mark.nightly
def test_a_minute(tmp_path: Path) -> None:
    """Nothing hangs, is refused or stays. A minute has too few requests for the bound of ten."""
    assert soak(tmp_path, alone=12.0, each=2.0, names=flood_child.NAMES) <= 2 * MOST_TIMES


@pytest.mark.bench
def test_ten_minutes(tmp_path: Path) -> None:
    """MIXEDKV_SOAK_ATTACKS: some attacks alone, with commas between; MIXEDKV_SOAK_SECONDS: of all."""
    names = [name for name in os.environ.get("MIXEDKV_SOAK_ATTACKS", "").split(",") if name]
    names = names or flood_child.NAMES
    seconds = float(os.environ.get("MIXEDKV_SOAK_SECONDS", "600"))
    each = seconds * 3 / 4 / len(names)
    assert soak(tmp_path, alone=seconds / 4, each=each, names=names) <= MOST_TIMES
