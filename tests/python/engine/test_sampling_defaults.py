"""Sampling as a model's file recommends it, as llama-server does it, and as options say it."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from mixedkv.bundled import model_path
from mixedkv.cli.model import sampling_options
from mixedkv.engine.sample.sampling import Sampling
from mixedkv.model.gguf_file import read_model_file
from mixedkv.model.sampling_defaults import sampling_defaults
from support.models.sampled_model import recommending
from support.patience import PATIENCE
from support.servers.server import running

pytestmark = pytest.mark.full

PROMPT = {"prompt": "On Monday", "max_tokens": 16, "ignore_eos": True}


def test_the_file_comes_before_llama_servers(tmp_path: Path) -> None:
    plain = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    assert sampling_defaults(read_model_file(model_path()).metadata) == plain
    path = recommending(tmp_path / "a.gguf", temp=0.25, top_k=20, penalty_repeat=1.5)
    given = sampling_defaults(read_model_file(path).metadata)
    assert given == {**plain, "temperature": 0.25, "top_k": 20, "repeat_penalty": 1.5}
    assert Sampling(**given)


@pytest.mark.parametrize("value", [-1, 1e9, float("nan"), "hot", True, [0.5]])
def test_a_bad_recommendation_is_left_out(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert sampling_defaults({"general.sampling.temp": value})["temperature"] == 0.8
    assert "general.sampling.temp" in caplog.text
    assert "a number from 0 to 100" in caplog.text


def test_a_number_is_taken_however_the_file_writes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Converters write numbers as they find them."""
    path = recommending(tmp_path / "a.gguf", top_k=20.0, temp=1, penalty_last_n=0.0, mirostat=0.0)
    given = sampling_defaults(read_model_file(path).metadata)
    assert (given["top_k"], given["temperature"], given["repeat_last_n"]) == (20, 1, 0)
    assert all(type(given[name]) is int for name in ("top_k", "repeat_last_n", "mirostat"))
    assert Sampling(**given)
    assert sampling_defaults({"general.sampling.top_p": "0.7"})["top_p"] == 0.7
    assert not caplog.text
    assert sampling_defaults({"general.sampling.top_k": 20.5})["top_k"] == 40
    assert "general.sampling.top_k=20.5" in caplog.text


def answers(options: list[str], n: int = 3, **body: Any) -> list[str]:
    with running("--n-ctx", "512", *options) as server:
        return [server.post("/v1/completions", {**PROMPT, **body})["choices"][0]["text"] for _ in range(n)]


@pytest.mark.nightly
def test_a_server_samples_as_it_was_told(tmp_path: Path) -> None:
    (greedy,) = answers([], n=1, temperature=0)
    cold = recommending(tmp_path / "cold.gguf", temp=0.0)
    assert answers(["-m", str(cold)]) == [greedy] * 3
    assert answers(["--sampling", "temperature=0"]) == [greedy] * 3
    assert answers(["--sampling", "top_k=1"]) == [greedy] * 3
    assert len(set(answers(["--sampling", "temperature=1.5"], n=6))) > 1
    assert len(set(answers(["--sampling", "temperature=1.5,seed=7"]))) == 1
    hot = answers(["-m", str(cold), "--sampling", "temperature=1.5,seed=7"], n=1)
    assert hot == answers([], n=1, temperature=1.5, seed=7) != [greedy]


def run(*args: str) -> str:
    command = [sys.executable, "-m", "mixedkv", "run", "--n-ctx", "512", "-n", "16", "-p", "On Monday", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout


@pytest.mark.nightly
def test_run_samples_as_it_was_told(tmp_path: Path) -> None:
    greedy = run("--raw", "--temp", "0")
    cold = str(recommending(tmp_path / "cold.gguf", temp=0.0))
    assert run("--raw", "-m", cold) == run("--raw", "--top-k", "1") == greedy
    seeded = [
        "--raw",
        "--temp",
        "2",
        "--top-p",
        "0.9",
        "--min-p",
        "0.01",
        "--repeat-penalty",
        "1.1",
        "--seed",
        "3",
    ]
    assert run(*seeded) == run(*seeded) != greedy


@pytest.mark.nightly
def test_run_asks_unless_it_is_raw() -> None:
    asked, raw = run("--temp", "0"), run("--temp", "0", "--raw")
    body = {"messages": [{"role": "user", "content": "On Monday"}], "max_tokens": 16, "temperature": 0}
    with running("--n-ctx", "512") as server:
        assert asked == server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"] + "\n"
    assert asked != raw


def test_an_option_of_the_command_line_comes_before_the_files_recommendation(tmp_path: Path) -> None:
    """Zero is an option too. What neither says is left to llama.cpp."""
    path = recommending(tmp_path / "m.gguf", temp=0.5, top_k=7)
    unsaid = dict.fromkeys(("top_k", "top_p", "min_p", "repeat_penalty", "seed", "temp"))
    said = {"top_k": 0, "temp": 0.0, "top_p": 0.9, "seed": 0}
    of_file = {"temperature": 0.5, "top_k": 7, "top_p": 0.95, "min_p": 0.05}
    assert sampling_options(Namespace(**unsaid), path) == of_file
    options = {"temperature": 0.0, "top_k": 0, "top_p": 0.9, "min_p": 0.05, "seed": 0}
    assert sampling_options(Namespace(**{**unsaid, **said}), path) == options
