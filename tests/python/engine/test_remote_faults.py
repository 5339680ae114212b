"""A remote that is killed, silent, slow, cut off or damaged: answers are right, and others' steps go on."""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mixedkv.bundled.corpus import make_recall
from mixedkv.engine.connectors.store_connector import StoreConnector
from mixedkv.engine.jobs.job import Job
from mixedkv.engine.schedule.contract import Observer
from mixedkv.store import KVStore
from support.patience import wait_for
from support.servers.remote import Line, free_port, redis_server
from support.servers.server import Direct

pytestmark = pytest.mark.full

KEY = b"k" * 32
FAULTS = ("none", "none", "silent", "slow", "cut", "cut", "damaged", "damaged", "damaged", "killed")
BLOCK = 20  # trials with the remote, and as many without


class Gaps(Observer):
    """Seconds between the tokens of the answer that is watched."""

    def __init__(self) -> None:
        self.watched: Job | None = None
        self.seconds: list[float] = []

    def token(self, job: Job, now: float) -> None:
        if job is self.watched and job.t_last is not None:
            self.seconds.append(now - job.t_last)


class One:
    """An engine with a store, and a greedy answer beside which others are asked for."""

    def __init__(self, stack: ExitStack, remote: str | None, seed: int = 0) -> None:
        self.seed = seed
        self.store = KVStore(None, remote=remote, key=lambda: KEY)
        self.gaps = Gaps()
        self.connector = StoreConnector(self.store)
        self.direct = stack.enter_context(Direct(n_ctx=4096, connector=self.connector, observer=self.gaps))

    def text(self, number: int) -> tuple[str, str]:
        """Of an answer, and where its prompt's rows came from."""
        job, done = self.direct.answer(make_recall(10_000 * (1 + self.seed) + number, 8).prompt, 6)
        return done.text, job.cached_tier

    @contextmanager
    def answering(self) -> Iterator[None]:
        job, _ = self.direct.start(make_recall(9_999, 3).prompt, 2000, ignore_end=True)
        self.gaps.watched = job
        try:
            yield
        finally:
            self.gaps.watched = None
            self.direct.engine.cancel(job)
            self.direct.call(lambda: None)


def damaged(value: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return value[: rng.randrange(len(value))]
    changed = bytearray(value)
    for at in rng.sample(range(len(value)), min(len(value), rng.choice([1, 20]))):
        changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed)


def check(
    n: int, timeout: float, folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int = 0
) -> dict[str, Any]:
    """Trials, each with a prompt that only the remote knows, while another answer is generated."""
    import redis

    monkeypatch.setattr("mixedkv.store.remote.backend.FAILURES", 10**9)  # every trial asks
    port, tiers = free_port(), dict.fromkeys(FAULTS, 0)
    with ExitStack() as stack:
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(0.0005)  # as the server does
        server, _ = stack.enter_context(redis_server(folder, port=port))
        client = redis.Redis(port=port)
        line = Line(port)
        stack.callback(line.close)
        values: list[dict[bytes, bytes]] = []
        expected: list[str] = []
        with ExitStack() as first:
            writer = One(first, f"redis://127.0.0.1:{port}/0?timeout=20", seed)
            for number in range(n):
                expected.append(writer.text(number)[0])
                wait_for(lambda: not writer.connector.stats()["waiting_to_be_stored"])
                assert writer.store._remote is not None
                assert writer.store._remote.flush(60)
                names = client.keys("*")
                values.append({name: client.get(name) for name in names})
                client.flushall()
        ones = {
            "remote": One(stack, f"redis://127.0.0.1:{line.port}/0?timeout={timeout}", seed),
            "alone": One(stack, None, seed),
        }
        for begin in range(0, n, BLOCK):
            for name, one in ones.items():  # with the same going on around it
                with one.answering():
                    for number in range(begin, min(begin + BLOCK, n)):
                        rng = random.Random(f"{seed} {number}")
                        fault, whole = rng.choice(FAULTS), values[number]
                        if fault == "damaged":
                            at = rng.choice(sorted(whole))
                            whole = {**whole, at: damaged(whole[at], rng)}
                        client.flushall()
                        client.mset(whole)
                        line.mode = fault if fault in ("silent", "slow", "cut") else "open"
                        killer = threading.Timer(rng.random() * 0.01, server.kill)
                        if fault == "killed":
                            killer.start()
                        text, tier = one.text(number)
                        line.mode = "open"
                        assert text == expected[number], (name, number, fault)
                        tiers[fault] += tier == "remote"
                        if fault == "killed":
                            killer.join()
                            server, _ = stack.enter_context(redis_server(folder, port=port))
    assert tiers["none"] > 0
    return {"tiers": tiers, "gaps": {name: np.array(one.gaps.seconds) for name, one in ones.items()}}


@pytest.mark.needs("redis")
@pytest.mark.slow
def test_answers_are_right_whatever_the_remote_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "mixedkv")
    check(24, 0.5, tmp_path, monkeypatch)


@pytest.mark.needs("redis")
@pytest.mark.bench
@pytest.mark.parametrize("seed", range(4))
def test_1000_faults(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A quarter each. With -s it prints the figures."""
    caplog.set_level(logging.CRITICAL, "mixedkv")
    found = check(250, 0.1, tmp_path, monkeypatch, seed)
    p99 = {name: float(np.percentile(gaps, 99)) for name, gaps in found["gaps"].items()}
    longest = {name: float(gaps.max()) for name, gaps in found["gaps"].items()}
    print(found["tiers"], "p99", p99, "longest", longest, {n: len(g) for n, g in found["gaps"].items()})
    assert p99["remote"] < 1.2 * p99["alone"]


@pytest.mark.needs("redis")
def test_a_remote_that_is_silent_stalls_no_step(tmp_path: Path) -> None:
    """While one prompt waits for a minute's time-out, another answer comes to its end."""
    with ExitStack() as stack:
        _, port = stack.enter_context(redis_server(tmp_path))
        line = Line(port)
        one = One(stack, f"redis://127.0.0.1:{line.port}/0?timeout=60")
        running, _ = one.direct.start(make_recall(1, 3).prompt, 100, ignore_end=True)
        wait_for(lambda: running.n_answer > 0)
        line.mode = "silent"
        waiting, _ = one.direct.start(make_recall(2, 8).prompt, 1)
        begin = time.monotonic()
        wait_for(lambda: running.n_answer == 100 or time.monotonic() > begin + 50)
        assert (running.n_answer, waiting.n_answer) == (100, 0)
        line.close()  # an end to the waiting
