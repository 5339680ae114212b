"""`mixedkv bench fleet`: what its rows say, and a small run on Ray Serve."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mixedkv.cli import main
from mixedkv_bench import fleet
from mixedkv_bench.fleet import RESUME_TABLE, TABLE, FleetRow, ResumeRow
from mixedkv_bench.harness import replay as replaying
from mixedkv_bench.harness.chat_client import ChatAnswer, ClientSampling
from mixedkv_bench.harness.replay import Conversation, Replay, replay
from mixedkv_bench.serve import ServeWork
from support.bench_support import run
from support.remote_servers import redis_server

pytestmark = pytest.mark.nightly

HEAD: dict[str, Any] = {"kv": "mixed", "flash_attn": False, "threads": 1, "replicas": 2}


def answer(seconds: float, n_prompt: int, n_cached: int) -> ChatAnswer:
    usage = {"completion_tokens": 4, "prompt_tokens": n_prompt}
    details = {"cached_tokens": n_cached, "cached_tier": "remote"}
    return ChatAnswer([seconds], ["a"], "length", {**usage, "prompt_tokens_details": details})


def test_rows_of_rounds() -> None:
    rounds = [
        Replay(seconds, [[answer(0.4, 100, 0)] * 2, [answer(0.1, 200, 150)] * 2]) for seconds in (1, 2, 4)
    ]
    work = ServeWork(n_prompt=100, n_gen=4, turns=2, clients=(2,), threads=1, repeats=3, peer=False)
    found = fleet._of_rounds(rounds, work)
    assert found["hit_ratio"] == 0.5
    assert found["tps"] == 8
    assert [(part.turn, part.n, part.ttft, part.cached_tokens) for part in found["by_turn"]] == [
        (1, 6, 0.4, 0),
        (2, 6, 0.1, 150),
    ]
    head = {**HEAD, "clients": 2, "n_prompt": 100, "n_gen": 4, "routing": "ray", "shared": True}
    lines = list(TABLE.lines([FleetRow.model_validate({**head, **found})]))
    assert lines[1:2] == ["Fleet of 2 replicas"]
    assert lines[3].split() == ["ray,", "shared", "2", "50%", "150", "100", "ms", "8.0"]


def test_a_resumed_row() -> None:
    row = ResumeRow.model_validate(
        {**HEAD, "tier": "remote", "n": 3, "n_prompt": 900, "cached_tokens": 880.0, "ttft": 0.05}
        | {"ttft_low": 0.04, "ttft_high": 0.06, "vs_disk": 1.25, "same": True}
    )
    lines = list(RESUME_TABLE.lines([row]))
    assert lines[3].split() == ["remote", "3", "900", "880", "50", "ms", "1.25", "the", "same"]


def test_a_replay_goes_on_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    @contextlib.asynccontextmanager
    async def connect(url: str) -> AsyncIterator[str]:
        yield url

    async def ask(_: str, body: dict[str, Any]) -> ChatAnswer:
        asked.append([message["content"] for message in body["messages"]])
        return ChatAnswer([0.1], [f"to {asked[-1][-1]}"], "stop")

    monkeypatch.setattr(replaying, "connect", connect)
    monkeypatch.setattr(replaying, "ask", ask)
    whole = [Conversation((f"{i}a", f"{i}b", f"{i}c")) for i in range(3)]
    begun = [Conversation(one.messages[:2]) for one in whole]
    sampling = ClientSampling(4, ())
    before = replay("", begun, 2, sampling)
    del asked[:]
    found = replay("", whole, 2, sampling, before)
    assert sorted(asked) == [[f"{i}a", f"to {i}a", f"{i}b", f"to {i}b", f"{i}c"] for i in range(3)]
    assert found.answers[:2] == before.answers
    assert [one.text for one in found.answers[2]] == ["to 0c", "to 1c", "to 2c"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--replicas", "0"], "argument --replicas"),
        (["--turns", "1"], "--turns 1: use 2 or more"),
        (["--flash-attn", "on"], "unrecognized arguments: --flash-attn on"),
    ],
)
def test_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(fleet.importlib.util, "find_spec", lambda name: name)
    try:
        code = main(["bench", "fleet", *arguments])
    except SystemExit as end:  # argparse
        code = end.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_without_ray(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet.importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "fleet"]) == 2
    assert "fleet needs Ray Serve: run pip install 'mixedkv[ray]'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray Serve is not installed")
def test_a_small_fleet(tmp_path: Path) -> None:
    small = ["--replicas", "2", "--clients", "2", "--turns", "2", "--n-prompt", "600", "--n-gen", "4"]
    with redis_server(tmp_path) as (_, port):
        remote = ["--remote", f"redis://127.0.0.1:{port}/0?timeout=20", "--repeats", "1"]
        rows = run(tmp_path / "f.json", "fleet", *small, *remote)["rows"]
    found = {(row["routing"], row["shared"]): row for row in rows if row["test"] == "fleet"}
    routings = [("random", False), ("ray", False), ("prefix", False), ("random", True), ("prefix", True)]
    assert list(found) == routings
    assert all(row["by_turn"][0]["cached_tokens"] < 100 for row in found.values())
    assert found["prefix", False]["by_turn"][1]["cached_tokens"] > 500
    resumed = {row["tier"]: row for row in rows if row["test"] == "fleet_resume"}
    assert set(resumed) == {"disk", "remote"}
    for row in resumed.values():
        assert 2 <= row["n"] <= 6  # of eight; replicas have about as many
        assert row["same"] is True
        assert row["cached_tokens"] > 500
