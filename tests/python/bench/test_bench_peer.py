"""Another program in the tables: a llama-bench or a llama-sweep-bench, given by its path."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mixedkv.bundled import model_path
from mixedkv.cli import main
from mixedkv.model.gguf_file import read_model_file
from mixedkv_bench.harness.bench_peer import BenchRunner, bench_seconds, find_peer, sweep_seconds
from mixedkv_bench.harness.cache_settings import make_settings
from mixedkv_bench.harness.contexts import CannotRunError
from mixedkv_bench.harness.speed_run import SpeedWork
from support.bench import run

pytestmark = pytest.mark.full

WORK = SpeedWork(depth=1024, n_prompt=512, n_gen=32, threads=2)
BENCH_HELP = "-p, --n-prompt <n>\n-d, --n-depth <n>"
IK_BENCH_HELP = "-p, --n-prompt <n>\n-gp <pp,tg>"
SWEEP_HELP = "usage: llama-sweep-bench\n--sweep-stride N\n-wb, --warmup-batch"
OLD_SWEEP_HELP = "usage: llama-sweep-bench"

BENCH = """options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert options["-t"] == "1" and options.get("-d") == DEPTH, options
slow = 2 if options["-ctk"] == "q4_0" else 1
n_prompt, n_gen = int(options["-p"]), int(options["-n"])
print(json.dumps([{"n_prompt": n_prompt, "n_gen": 0, "avg_ns": slow * 1e12},
                  {"n_prompt": 0, "n_gen": n_gen, "avg_ns": slow * 1e12}]))"""
# fills a cache of -c tokens in steps of -ub, and takes times at each, or at every Nth: N_KV + 1, N_KV + 2 s
SWEEP = """arguments = iter(sys.argv[1:])
options = {key: None if key in ("-wb", "-rtr") else next(arguments) for key in arguments}
assert options["-fa"] == "on" and options["-b"] == options["-ub"] and TEST(options), options
n_ctx, step, n = (int(options[key]) for key in ("-c", "-ub", "-n"))
if "-wb" in options and n_ctx <= step:
    sys.exit("failed to decode the batch, n_batch = 512, ret = 1")  # its warm-up leaves a token there
print("|    PP |     TG |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |", file=sys.stderr)
for at in range(0, n_ctx, step * int(options.get("--sweep-stride", 1))):
    print(f"| {step} | {n} | {at} | {at + 1}.0 | 1.0 | {at + 2}.0 | 1.0 |", file=sys.stderr)
open("llama.log", "w").close()"""


def program(path: Path, help: str, source: str = "") -> Path:
    """A program that prints a help, with the status 1 as ik_llama.cpp's, else does what `source` says."""
    lines = [f"#!{sys.executable}", "import json, sys"]
    lines += ["if sys.argv[1:] == ['--help']:", f"    sys.exit({help!r})", source]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return path


def runner(path: Path, *arguments: str, work: SpeedWork = WORK) -> BenchRunner:
    (setting,) = make_settings(["q4_0"], "on")
    return find_peer(path, arguments).runner(read_model_file(model_path()), setting, work)


def test_what_llama_bench_prints() -> None:
    rows = [{"n_prompt": 512, "n_gen": 0, "avg_ns": 3e9}, {"n_prompt": 0, "n_gen": 32, "avg_ns": 5e8}]
    assert bench_seconds(json.dumps(rows), WORK) == (3.0, 0.5)
    for broken in ("", "{}", "[1]", json.dumps(rows[:1])):
        with pytest.raises(CannotRunError, match="printed no times"):
            bench_seconds(broken, WORK)


def test_what_llama_sweep_bench_prints() -> None:
    """As ik_llama.cpp's prints it; other rows and other sizes are not what was asked."""
    row = "|   512 |     32 |   1024 |    0.389 |  1316.97 |    0.111 |   288.35 |"
    table = (
        f"main: n_kv_max = 1536\n\n|    PP |     TG |\n|-------|--------|\n{row.replace('1024', '   0')}\n"
    )
    assert sweep_seconds(table + row, WORK) == (0.389, 0.111)
    for broken in ("", table, row.replace("512", "256"), row.replace(" 32 ", " 16 "), row[:40]):
        with pytest.raises(CannotRunError, match="printed no times"):
            sweep_seconds(broken, WORK)


@pytest.mark.parametrize(
    ("help", "depth"), [(BENCH_HELP, "40"), (IK_BENCH_HELP, "0")], ids=["llama.cpp", "ik_llama.cpp"]
)
def test_a_llama_bench_takes_its_turns(help: str, depth: str, tmp_path: Path) -> None:
    source = BENCH.replace("DEPTH", repr(None if depth == "0" else depth))
    rival = program(tmp_path / "my-llama-bench", help, source)
    small = ["--depths", depth, "--repeats", "1", "--n-prompt", "8", "--n-gen", "2"]
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


@pytest.mark.parametrize(
    ("help", "passed"),
    [
        (SWEEP_HELP, '"-wb" in options and options["--sweep-stride"] == "2"'),
        (OLD_SWEEP_HELP, '"-wb" not in options and "--sweep-stride" not in options'),
    ],
    ids=["now", "before a stride"],
)
def test_a_sweep_takes_times_at_the_depth(help: str, passed: str, tmp_path: Path) -> None:
    sweep = program(
        tmp_path / "peer", help, SWEEP.replace("TEST(options)", passed + ' and options["-c"] == "2048"')
    )
    assert runner(sweep).measure() == (1025.0, 1026.0)
    assert not Path("llama.log").exists()


def test_a_sweep_in_the_tables(tmp_path: Path) -> None:
    """At depth 0 nothing is left out; it is given what the user adds for it."""
    sweep = program(
        tmp_path / "llama-sweep-bench", SWEEP_HELP, SWEEP.replace("TEST(options)", '"-rtr" in options')
    )
    small = ["--depths", "0,16", "--repeats", "1", "--n-prompt", "8", "--n-gen", "2", "--flash-attn", "on"]
    rows = run(tmp_path / "p.json", "speed", "--kv", "f16", *small, "--peer", str(sweep), "--peer-args=-rtr")
    theirs = {row["depth"]: row for row in rows if row["engine"] == "llama-sweep-bench"}
    assert [theirs[depth]["pp_tps"] for depth in (0, 16)] == pytest.approx([8 / 1, 8 / 17])
    assert [theirs[depth]["tg_tps"] for depth in (0, 16)] == pytest.approx([2 / 2, 2 / 18])


@pytest.mark.parametrize(
    ("help", "arguments", "words"),
    [
        (BENCH_HELP, ["--sequences", "2"], "--sequences 2: a --peer has one"),
        (BENCH_HELP, ["--peer-kv", "mixed"], "--peer-kv mixed: a peer knows uniform caches"),
        (BENCH_HELP, ["--peer-args='-x"], "--peer-args='-x: No closing quotation"),
        (IK_BENCH_HELP, ["--depths", "0,512"], "has no -d: use --depths 0, or give the llama-sweep-bench"),
        (
            SWEEP_HELP,
            ["--depths", "0,600"],
            "--depths 600: peer measures at multiples of --n-prompt 512: use 512 or 1024",
        ),
        (SWEEP_HELP, ["--depths", "0", "--n-prompt", "8", "--n-gen", "9"], "--n-gen 9: peer has room"),
        ("usage: ls", [], "is not that of a llama-bench or llama-sweep-bench"),
    ],
)
def test_what_a_peer_cannot_measure(
    help: str, arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rival = program(tmp_path / "peer", help)
    assert main(["bench", "speed", "--peer", str(rival), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_program_that_fails(tmp_path: Path) -> None:
    failing = program(tmp_path / "llama-bench", BENCH_HELP, "sys.exit('no such option')")
    with pytest.raises(CannotRunError, match="llama-bench ended with status 1: no such option"):
        runner(failing).measure()


def test_no_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "speed", "--peer", str(tmp_path / "none")]) == 2
    assert "is not a program" in capsys.readouterr().err
    assert main(["bench", "speed", "--peer-args=-rtr"]) == 2
    assert "--peer-args=-rtr: there is no --peer that takes them" in capsys.readouterr().err
