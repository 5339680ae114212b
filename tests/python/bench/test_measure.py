"""The scripts of tests/measure, from which the pages have figures, run and say what they measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mixedkv.bundled import model_path
from support import REPOSITORY
from support.bench import run

pytestmark = pytest.mark.nightly

MEASURE = REPOSITORY / "tests" / "measure"
SERVER = "{} -m mixedkv serve --kv {} --n-ctx 2048 --parallel 2 --threads 1 --port {{port}}"


def measure(script: str, *arguments: str) -> str:
    """What a script prints."""
    command = [sys.executable, str(MEASURE / f"{script}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_aged() -> None:
    small = ["--clients", "3", "--steps", "20", "--repeats", "1", "--n-gen", "4"]
    assert "mixed  " in measure("aged", "--kv", "mixed", *small)


def test_speculation() -> None:
    out = measure("speculation", "--depth", "300", "--n-gen", "8", "--repeats", "1")
    assert [line.partition(":")[0] for line in out.splitlines()] == [
        "repeats", "is certain", "goes on", "is unlike"
    ]  # fmt: skip


def test_constrained() -> None:
    out = measure("constrained", "-m", str(model_path()), "--repeats", "1")
    assert [line.partition(":")[0] for line in out.splitlines()] == ["mixed", "text"]


def test_store() -> None:
    small = ["--n-prompt", "256", "--turns", "1", "--repeats", "1", "--threads", "1"]
    lines = measure("store", "--kv", "mixed", *small).splitlines()
    tiers = [line.partition(":")[0] for line in lines]
    assert tiers == [f"mixed, {x}" for x in ("cold", "ram", "disk", "encrypted", "new process", "turn 1")]


def test_serve(tmp_path: Path) -> None:
    """Two servers of ours in turns, the second with a cache of half the bits."""
    small = ["--clients", "1", "3", "--turns", "2", "--n-prompt", "200", "--shared", "0.5", "--n-gen", "4"]
    servers = [SERVER.format(sys.executable, kv) for kv in ("f16", "mixed")]
    rounds = tmp_path / "rounds.json"
    out = measure("serve", *small, "--repeats", "2", "--json", str(rounds), *servers).splitlines()
    assert [line.split(":")[0] for line in out if " clients: " in line] == ["  1 clients", "  3 clients"] * 2
    assert sum(line.startswith("  by the last server's: tokens/s ") for line in out) == 2
    rows = [json.loads(line) for line in rounds.read_text().splitlines()]
    assert [(row["server"], row["clients"]) for row in rows[:4]] == [
        (server, clients) for clients in (1, 3) for server in reversed(servers)
    ]
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        answers = [answer for turns in row["conversations"] for answer in turns]
        assert row["tokens"] == 4 * len(answers) == 4 * 2 * row["clients"]
        assert 0 < max(answer["first"] for answer in answers) < row["seconds"]
        assert row["cpu"] > 0
    shared = [
        turns[0]["usage"]["prompt_tokens_details"]["cached_tokens"] for turns in rows[0]["conversations"]
    ]
    assert min(shared) >= 80, "the warm-up has left the common half"


def test_split() -> None:
    pytest.importorskip("grpc", reason="needs the extra `split`")
    out = measure("split", "--kv", "mixed", "--n-prompt", "32", "--n-gen", "4", "--repeats", "1")
    assert "mixed, 100 ms: call 1" in out
    assert "mixed, 8 clients:" in out


@pytest.mark.needs("root")
def test_streaming() -> None:
    small = ["--memory", "1GiB", "--modes", "direct", "--clients", "2", "--n-gen", "2"]
    out = measure("streaming", "-m", str(model_path()), *small)
    assert out.splitlines()[1].startswith("direct in 1 GiB")
    assert "others" not in out


@pytest.mark.needs("matplotlib")
def test_plots(tmp_path: Path) -> None:
    small = ["--depths", "0,64", "--repeats", "1", "--n-prompt", "8", "--n-gen", "2"]
    run(tmp_path / "s.json", "speed", "--kv", "mixed", *small)
    picture = tmp_path / "s.png"
    measure("plots", "speed", str(tmp_path / "s.json"), str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
