"""Work that is not a step: in turns of tenants, under a clock, with limits, and ended with its client."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mixedkv.work.current import GivenUpError, Work, at, current
from mixedkv.work.fair_pool import FairPool
from mixedkv.work.processes import EndedError, Task, TaskProcesses
from mixedkv.work.turns import unlimited
from support.patience import PATIENCE, wait_for

pytestmark = pytest.mark.core

_TASKS = """
import os, time
def echo(fields, data): return {"pid": os.getpid(), **fields}, data[::-1]
def spin(fields, data):
    open(fields["file"], "w").close()
    while True: pass
def sleep(fields, data): time.sleep(fields["seconds"]); return {}, b""
def grow(fields, data): held = bytearray(fields["size"]); return {}, b""
held = []
def keep(fields, data): held.append(b"x" * fields["size"]); return {"pid": os.getpid()}, b""
def refuse(fields, data): raise ValueError("no such thing")
def crash(fields, data): os.abort()
def print_much(fields, data): print("x" * 100_000, flush=True); os.write(1, b"y" * 1000); return {}, b"answer"
"""


@pytest.fixture
def workers() -> Iterator[TaskProcesses]:
    found = TaskProcesses(2)
    yield found
    found.end()


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    file = tmp_path / "tasks.py"
    file.write_text(_TASKS)
    return file


def task(file: Path, name: str, seconds: float = 60.0, n_bytes: int = 1 << 30) -> Task:
    return Task(str(file), name, seconds, n_bytes)


def test_a_task_gets_bytes_and_returns_bytes(workers: TaskProcesses, tasks: Path) -> None:
    data = bytes(range(256)) * 10_000
    fields, out = workers.call(task(tasks, "echo"), {"a": "é"}, data)
    assert (fields["a"], out) == ("é", data[::-1])
    assert workers.call(task(tasks, "print_much"), {})[1] == b"answer"
    with pytest.raises(ValueError, match=r"^no such thing$"):
        workers.call(task(tasks, "refuse"), {})


def test_what_takes_more_than_it_may_is_ended(workers: TaskProcesses, tasks: Path, tmp_path: Path) -> None:
    with pytest.raises(EndedError, match=r"it takes more than 0\.2 seconds or 1 GiB"):
        workers.call(task(tasks, "spin", 0.2), {"file": str(tmp_path / "begun")})
    with pytest.raises(EndedError, match="it takes more than 64 MiB"):
        workers.call(task(tasks, "grow", n_bytes=64 << 20), {"size": 1 << 30})
    with pytest.raises(EndedError):
        workers.call(task(tasks, "crash"), {})
    assert workers.call(task(tasks, "echo"), {}, b"ab")[1] == b"ba"


def _in_a_thread(work: Work, workers: TaskProcesses, expected: Task, fields: dict[str, Any]) -> list[Any]:
    """What the work raises, once it has."""
    raised: list[Any] = []

    def run() -> None:
        try:
            with at(work):
                workers.call(expected, fields)
        except BaseException as error:
            raised.append(error)

    threading.Thread(target=run, daemon=True).start()
    return raised


def test_work_that_is_given_up_ends_at_once(workers: TaskProcesses, tasks: Path, tmp_path: Path) -> None:
    """The one that runs and the one that waits for its turn."""
    works = [Work("mallory") for _ in range(3)]
    fields = {"file": str(tmp_path / "begun")}
    raised = [_in_a_thread(work, workers, task(tasks, "spin"), fields) for work in works]
    wait_for((tmp_path / "begun").exists)
    for work in works:
        work.give_up()
    wait_for(lambda: all(raised))
    assert {type(each[0]) for each in raised} == {GivenUpError}
    with at(Work("mallory")):
        assert workers.call(task(tasks, "echo"), {}, b"ab")[1] == b"ba"


def test_a_tenant_leaves_a_process_to_others(workers: TaskProcesses, tasks: Path, tmp_path: Path) -> None:
    works = [Work("mallory") for _ in range(8)]
    fields = {"file": str(tmp_path / "begun")}
    raised = [_in_a_thread(work, workers, task(tasks, "spin"), fields) for work in works]
    wait_for((tmp_path / "begun").exists)
    with at(Work("anna")):
        assert workers.call(task(tasks, "echo"), {}, b"ab")[1] == b"ba"
    for work in works:
        work.give_up()
    wait_for(lambda: all(raised))


def test_a_process_that_had_nothing_to_do_starts_again(workers: TaskProcesses, tasks: Path) -> None:
    with at(Work("anna")):
        first, _ = workers.call(task(tasks, "echo"), {})
        for process in workers._all:  # as after `_IDLE_SECONDS`: its input ends, and it with 0
            if process._process is not None:
                assert process._process.stdin is not None
                process._process.stdin.close()
                process._process.stdin = None
                process._process.wait(PATIENCE)
        second, _ = workers.call(task(tasks, "echo"), {})
    assert first["pid"] != second["pid"]


def test_a_process_does_not_keep_much_memory(workers: TaskProcesses, tasks: Path) -> None:
    with at(Work("anna")):
        first, _ = workers.call(task(tasks, "keep"), {"size": 300 << 20})
        second, _ = workers.call(task(tasks, "echo"), {})
    assert first["pid"] != second["pid"] or sys.platform == "darwin"


def test_a_pool_gives_up_what_is_cancelled() -> None:
    begun, seen = threading.Event(), list[str]()

    def wait() -> None:
        begun.set()
        end = time.monotonic() + PATIENCE
        try:
            while time.monotonic() < end:
                current().check()
                time.sleep(0.001)
        except GivenUpError:
            seen.append("given up")

    async def run() -> None:
        pool = FairPool(1, "test", unlimited)
        running = asyncio.ensure_future(pool.run("mallory", wait))
        waiting = asyncio.ensure_future(pool.run("mallory", seen.append, "it ran"))
        await asyncio.to_thread(begun.wait, PATIENCE)
        for each in (waiting, running):
            each.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        assert await asyncio.wait_for(pool.run("anna", lambda: "answered"), PATIENCE) == "answered"
        pool.close()

    asyncio.run(run())
    assert seen == ["given up"]
