"""An engine that makes no step although work waits is noticed, and tells where it is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mixedkv_server import watchdog
from mixedkv_server.watchdog import EXIT_CODE, StepWatch
from support.patience import PATIENCE, wait_for
from support.servers.server import Server

pytestmark = pytest.mark.full

PROGRAM = Path(__file__).parents[1] / "support" / "children" / "stuck_child.py"
ASK = {"prompt": "x", "max_tokens": 1}


class Steps:
    n_steps, slowest_step_seconds, has_work = 1, 0.1, True


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    return tmp_path / "planted"


@pytest.fixture
def server(planted: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    options = getattr(request, "param", ())
    server = Server("--n-ctx", "512", *options, program=[str(PROGRAM), str(planted)])
    try:
        yield server.wait_until_ready()
    finally:
        if server.process.poll() is None:
            server.stop(signal.SIGKILL)


def ask_in_vain(server: Server) -> threading.Thread:
    thread = threading.Thread(target=server.status, args=("POST", "/v1/completions", ASK), daemon=True)
    thread.start()
    return thread


def test_a_stuck_engine_is_not_healthy_and_its_stack_is_in_the_log(server: Server, planted: Path) -> None:
    assert server.status("POST", "/v1/completions", ASK) == 200
    planted.touch()
    asking = ask_in_vain(server)
    wait_for(lambda: server.status("GET", "/health") == 503)
    assert server.request("GET", "/health")[1]["error"]["code"] == "engine_stuck"
    assert server.status("GET", "/ready") == 503
    wait_for(lambda: "admit_for_ever" in server.log)
    planted.unlink()
    asking.join(PATIENCE)
    wait_for(lambda: server.status("GET", "/health") == 200)
    assert server.log.count("the engine is stuck") == 1


@pytest.mark.nightly
def test_a_stuck_server_ends_soon_when_it_is_told_to(server: Server, planted: Path) -> None:
    planted.touch()
    ask_in_vain(server)
    wait_for(lambda: server.status("GET", "/health") == 503)
    assert server.stop() == 1
    assert "the shutdown took more than 2 seconds" in server.log


@pytest.mark.parametrize("server", [("--restart-when-stuck",)], indirect=True)
def test_a_stuck_server_ends_for_its_supervisor(server: Server, planted: Path) -> None:
    planted.touch()
    ask_in_vain(server)
    assert server.process.wait(PATIENCE) == EXIT_CODE
    wait_for(lambda: "admit_for_ever" in server.log)


def test_patience_is_twice_the_slowest_step_and_a_minute_at_least() -> None:
    steps = Steps()
    watch = StepWatch(steps)
    assert watch.patience == watchdog.LEAST_SECONDS == 60
    steps.slowest_step_seconds = 100.0
    assert watch.patience == 200
    for _ in range(199):
        watch.tick(1.0)
    assert not watch.is_stuck
    watch.tick(1.0)
    assert watch.is_stuck
    steps.n_steps += 1
    watch.tick(1.0)
    assert not watch.is_stuck


def test_who_has_no_work_is_not_stuck_and_a_first_step_may_take_long() -> None:
    steps = Steps()
    steps.n_steps = 0
    watch = StepWatch(steps)
    assert watch.patience == 600
    steps.has_work = False
    for _ in range(10_000):
        watch.tick(1.0)
    assert watch.seconds == 0
