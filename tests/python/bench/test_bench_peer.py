"""Another program in the tables: a llama-bench, given by its path."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mixedkv.bundled import model_path
from mixedkv.cli import main
from mixedkv.model.gguf_file import read_model_file
from mixedkv_bench.harness.bench_peer import BenchRunner, bench_seconds
from mixedkv_bench.harness.cache_settings import make_settings
from mixedkv_bench.harness.contexts import CannotRunError
from mixedkv_bench.harness.speed_run import SpeedWork
from support.bench_support import run

pytestmark = pytest.mark.nightly

WORK = SpeedWork(depth=600, n_prompt=512, n_gen=32, threads=2)


def program(path: Path, source: str) -> Path:
    path.write_text(f"#!{sys.executable}\nimport json, sys\n{source}\n")
    path.chmod(0o755)
    return path


def test_what_llama_bench_prints() -> None:
    rows = [{"n_prompt": 512, "n_gen": 0, "avg_ns": 3e9}, {"n_prompt": 0, "n_gen": 32, "avg_ns": 5e8}]
    assert bench_seconds(json.dumps(rows), WORK) == (3.0, 0.5)
    for broken in ("", "{}", "[1]", json.dumps(rows[:1])):
        with pytest.raises(CannotRunError, match="printed no times"):
            bench_seconds(broken, WORK)


def test_a_program_takes_its_turns(tmp_path: Path) -> None:
    rival = program(
        tmp_path / "my-llama-bench",
        """options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert options["-t"] == "1" and options["-d"] == "40", options
slow = 2 if options["-ctk"] == "q4_0" else 1
n_prompt, n_gen = int(options["-p"]), int(options["-n"])
print(json.dumps([{"n_prompt": n_prompt, "n_gen": 0, "avg_ns": slow * 1e12},
                  {"n_prompt": 0, "n_gen": n_gen, "avg_ns": slow * 1e12}]))""",
    )
    small = ["--depths", "40", "--repeats", "1", "--n-prompt", "8", "--n-gen", "2"]
    kv = ["--kv", "f16", "--kv", "mixed", "--flash-attn", "on", "--peer-kv", "f16", "--peer-kv", "q4_0"]
    rows = run(tmp_path / "p.json", "speed", "--peer", str(rival), *kv, *small)
    theirs = {row["kv"]: row for row in rows if row["engine"] == "my-llama-bench"}
    ours = {row["kv"]: row for row in rows if row["engine"] == "mixedkv"}
    assert theirs.keys() == {"f16", "q4_0"}
    assert ours.keys() == {"f16", "mixed"}
    assert theirs["q4_0"]["tg_tps"] == pytest.approx(2 / 2000)
    assert theirs["q4_0"]["tg_vs_peer"] == 0.5
    assert ours["mixed"]["tg_vs_peer"] > 1
    assert ours["mixed"]["pp_vs_peer"] > 1


def test_a_program_has_one_sequence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rival = str(program(tmp_path / "llama-bench", ""))
    assert main(["bench", "speed", "--peer", rival, "--sequences", "2"]) == 2
    assert "--sequences 2: a --peer has one" in capsys.readouterr().err
    assert main(["bench", "speed", "--peer", rival, "--peer-kv", "mixed"]) == 2
    assert "--peer-kv mixed: a peer knows uniform caches" in capsys.readouterr().err


def test_a_program_that_fails(tmp_path: Path) -> None:
    (setting,) = make_settings(["q4_0"])
    failing = program(tmp_path / "llama-bench", "sys.exit('no such option')")
    runner = BenchRunner(failing, read_model_file(model_path()), setting, WORK)
    with pytest.raises(CannotRunError, match="llama-bench ended with status 1: no such option"):
        runner.measure()


def test_no_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "speed", "--peer", str(tmp_path / "none")]) == 2
    assert "is not a program" in capsys.readouterr().err
