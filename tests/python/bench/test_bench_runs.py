"""Small runs of `mixedkv bench` on the bundled model: what the rows and the tables say."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mixedkv.bundled import model_path
from mixedkv.config import PRESETS, MixedKVConfig, parse_kv
from mixedkv.model.footprint import footprint, model_shape
from mixedkv.model.gguf_file import read_model_file
from mixedkv.model.layer_plan import LayerPlan
from mixedkv.model.measured_shares import read_shares
from mixedkv_bench import aged
from mixedkv_bench.catalog import Document
from mixedkv_bench.harness.cache_settings import DEFAULT_SPECS, make_settings
from mixedkv_bench.harness.contexts import CannotRunError
from mixedkv_bench.harness.neighbours import neighbours
from mixedkv_bench.harness.speed_run import SpeedWork
from mixedkv_bench.harness.stock_peer import Peer, stock_library
from support.bench_support import by_kv, run
from support.patience import PATIENCE, wait_for

pytestmark = pytest.mark.nightly

MIXED = "mixed:threshold=64,group=16"
SHAPE = model_shape(read_model_file(model_path()))


def test_the_default_settings() -> None:
    """F16 with and without flash attention, two of llama.cpp's quantised caches, three presets."""
    settings = make_settings(DEFAULT_SPECS)
    assert [s.flash_attn for s in settings if s.is_f16] == [False, True]
    assert {s.spec for s in settings if not s.is_f16 and s.is_peer} == {"q8_0", "q4_0"}
    assert sum(isinstance(s.kv, MixedKVConfig) for s in settings) == 3
    assert len({s.name for s in settings}) == len(settings) == 7


def test_sensitivity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.json"
    data = run(path, "sensitivity", "--n-ctx", "512", "--repeats", "1", "--bits", "5,6", "--threads", "1")
    layers = [row for row in data["rows"] if "layer" in row]
    assert [(row["layer"], row["part"]) for row in layers] == [(il, part) for il in range(6) for part in "kv"]
    assert layers[3]["kv"] == "mixed:cold=q8_0,layers=1:q8_0/iq4_nl"
    shares = read_shares(path)
    assert sum(shares.values()) > 0
    chosen = data["rows"][len(layers) :]
    for row, bits in zip(chosen, (5, 6), strict=True):
        assert bits - 0.25 < row["bits"] <= bits
        assert (
            footprint(
                SHAPE, replace(parse_kv(row["kv"]), quantization_threshold=0, sink_tokens=0), 512
            ).bits_per_element
            == row["bits"]
        )
        plan = LayerPlan(SHAPE, shares)
        assert row["kld_planned"] == pytest.approx(plan.divergence(plan.most(bits)))
        assert 0 < row["kld_mean"] < sum(shares.values())
    shown = capsys.readouterr().out
    assert re.search(r"iq4_nl in K or V of one layer\n.*\n  0 K +[\d.e-]+", shown)
    assert re.search(r"types of least divergence\n.*\n  mixed:\S+ +[45]\.\d\d", shown)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("", "Expecting value"), ("[]", "list indices"), ('{"rows": []}', "no share of each layer")],
)
def test_shares_of_another_file(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_shares(path)


def test_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--repeats", "3", "--n-prompt", "32", "--n-gen", "4", "--depths", "0,300"]
    data = run(tmp_path / "s.json", "speed", "--kv", "f16", "--kv", "q4_0", "--kv", MIXED, *small)
    assert {(row["kv"], row["flash_attn"], row["depth"]) for row in data["rows"]} == {
        (kv, flash, depth)
        for kv, flash in (("f16", False), ("f16", True), ("q4_0", True), (MIXED, True))
        for depth in (0, 300)
    }
    for row in data["rows"]:
        assert len(row["tg_samples"]) == 3
        assert 0 < row["tg_low"] <= row["tg_tps"] <= row["tg_high"]
        assert row["fill"] == ("synthetic" if row["depth"] else "real")
        assert row["attention"] == ("fused" if row["kv"] == MIXED else "llama.cpp")
    f16 = [row for row in data["rows"] if row["kv"] == "f16" and row["depth"] == 300]
    assert max(f16, key=lambda row: row["pp_tps"])["pp_vs_f16"] == 1
    assert by_kv(data["rows"], kv="q4_0", depth=300)["q4_0"]["tg_vs_uniform"] == 1
    out, err = capsys.readouterr()
    assert err == ""  # no progress bar where there is no terminal
    assert re.search(r"Speed at a depth of 300 tokens\n.*\n  f16 no flash +llama.cpp +[\d.]+", out)


def test_aged(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aged, "_AGEING", 20)
    small = ["--repeats", "3", "--n-gen", "4", "--clients", "2,3", "--flash-attn", "on"]
    data = run(tmp_path / "a.json", "aged", "--kv", "f16", "--kv", MIXED, *small)
    for row in by_kv(data["rows"]).values():
        assert (row["n_seq"], row["n_ctx"], row["steps"], len(row["ratio_samples"])) == (3, 3072, 20, 3)
        assert 0 < row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert row["fresh_ms"] > 0
    assert "A step of 3 sequences that have come and gone" in capsys.readouterr()[0]


def test_memory(tmp_path: Path) -> None:
    data = run(
        tmp_path / "m.json", "memory", "--kv", "q4_0", "--kv", MIXED, "--depths", "1024", "--budget", "1MiB"
    )
    rows = by_kv(data["rows"])
    per_token = 6 * 2 * 2 * 64  # elements: layers, K and V, heads, size
    assert rows["q4_0"]["kv_bytes"] == 1024 * per_token * 4.5 / 8
    hot_bits = 16 * (64 + 4 + 16) / 1024  # window, sinks, drafts
    assert rows[MIXED]["bits_per_element"] == pytest.approx(4.5 + hot_bits, rel=0.05)
    for row in rows.values():
        # a process with numpy and the model; bytes taken for KiB or the other way round would show
        assert row["kv_bytes"] + data["model"]["bytes"] < row["peak_rss_bytes"] < 2**30
    assert rows["q4_0"]["longest_n_ctx"] == 2**20 * 8 / 4.5 / per_token // 256 * 256
    assert rows[MIXED]["longest_n_ctx"] < rows["q4_0"]["longest_n_ctx"]


@pytest.fixture(scope="module")
def quality(tmp_path_factory: pytest.TempPathFactory) -> dict:
    path = tmp_path_factory.mktemp("bench") / "q.json"
    wide = "mixed:threshold=512,group=32,sinks=0,hot_budget=all"
    specs = [x for spec in ("f16", "q4_0", MIXED, wide) for x in ("--kv", spec)]
    return run(path, "quality", *specs, "--n-ctx", "512", "--repeats", "1", "--flash-attn", "off")


@pytest.mark.parametrize("mode", ["batch", "token"])
def test_quality(quality: dict, mode: str) -> None:
    rows = by_kv(quality["rows"], mode=mode)
    control = rows.pop("f32")
    assert control["control"] is True
    assert control["kld_max"] == 0
    assert control["same_top1"] == control["ppl_ratio"] == 1
    assert 0 < rows["f16"]["kld_mean"] < min(rows[MIXED]["kld_mean"], rows["q4_0"]["kld_mean"])
    assert rows["f16"]["kld_median"] < rows[MIXED]["kld_median"] < rows["q4_0"]["kld_median"]
    for row in rows.values():
        assert row["n_positions"] == 255  # the second half, whose last token has none to follow
        assert row["kld_median"] <= row["kld_p99"] <= row["kld_p999"] <= row["kld_max"]
        assert [part["to"] for part in row["by_position"]] == [64, 128, 256, 512]
        assert sum(part["n_positions"] for part in row["by_position"]) == 511


def test_a_window_over_the_context_is_as_good_as_f16(quality: dict) -> None:
    rows = by_kv(quality["rows"], mode="token")
    assert (
        rows["mixed:threshold=512,group=32,sinks=0,hot_budget=all"]["kld_mean"] < 2 * rows["f16"]["kld_mean"]
    )


def test_a_window_does_as_f16_before_it_is_full(quality: dict) -> None:
    rows = by_kv(quality["rows"], mode="token")
    first = {kv: row["by_position"][0]["kld_mean"] for kv, row in rows.items()}
    assert first[MIXED] < 2 * first["f16"] < first["q4_0"]


def test_quality_on_a_text_of_ones_own(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Ada's kite is red. The code of the mill is 4817. " * 60)
    data = run(
        tmp_path / "q.json",
        "quality",
        "--kv",
        "q8_0",
        "--text",
        str(text),
        "--n-ctx",
        "256",
        "--mode",
        "batch",
    )
    assert by_kv(data["rows"])["q8_0"]["n_positions"] % 127 == 0  # several documents, each by its second half


def test_all_of_a_model_of_ones_own(tmp_path: Path, zoo_path) -> None:
    """Quality on the generated sample, and no recall."""
    small = ["--depths", "256", "--repeats", "1", "--n-prompt", "8", "--n-gen", "2", "--n-ctx", "512"]
    data = run(tmp_path / "a.json", "all", "-m", str(zoo_path("llama-64")), "--kv", "q8_0", *small)
    assert [row["test"] for row in data["rows"]] == ["memory", "speed"] + 4 * ["quality"]
    assert not any("error" in row for row in data["rows"])


def test_recall(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = run(
        tmp_path / "r.json", "recall", "--kv", "q8_0", "--kv", MIXED, "--n-ctx", "1024", "--repeats", "1"
    )
    rows = by_kv(data["rows"])
    assert rows["f32"]["control"] is True
    assert rows["f32"]["agreement"]["whole"] == 1
    for row in rows.values():
        depths = [item["depth"] for item in row["recall"]]
        assert depths == sorted(depths, reverse=True)
        assert all(
            0 <= item["low"] <= item["correct"] / item["n"] <= item["high"] <= 1 for item in row["recall"]
        )
        assert (
            sum(item["n"] for item in row["recall"])
            == sum(item["n"] for item in row["recall_variants"])
            == 32
        )
        assert sum(item["correct"] for item in row["recall"]) >= 28, "the model does not know its facts"
        assert all(item["cold"] for item in row["recall"])  # the last is about 190 tokens back
        assert row["agreement"]["mean"] > 1
    assert re.search(r"mixed:threshold=64,group=16 +\S+ +8/8", capsys.readouterr().out)


def test_a_wide_window_is_told_from_a_cold_region(tmp_path: Path) -> None:
    spec = "mixed:threshold=1020,group=16,sinks=0,hot_budget=all"
    data = run(tmp_path / "r.json", "recall", "--kv", spec, "--n-ctx", "1024", "--repeats", "1")
    assert not any(item["cold"] for item in by_kv(data["rows"])[spec]["recall"])


def test_what_the_model_cannot_run_is_a_row_that_says_why(tmp_path: Path, zoo_path) -> None:
    """Heads of 48 elements do not fit the block of 32 of the quantised types."""
    model = ["-m", str(zoo_path("llama-48"))]
    small = ["--depths", "0", "--repeats", "1", "--n-prompt", "8", "--n-gen", "2", "--flash-attn", "on"]
    data = run(tmp_path / "s.json", "speed", *model, "--kv", "mixed", "--kv", "q4_0", "--kv", "f16", *small)
    rows = by_kv(data["rows"])
    assert "tg_tps" in rows["f16"]
    assert "error" not in rows["f16"]
    for kv in ("mixed", "q4_0"):
        assert "tg_tps" not in rows[kv]
        assert re.search(r"block|multiple|divisible|packs", rows[kv]["error"]), rows[kv]["error"]


@pytest.mark.parametrize("test", ["speed", "memory"])
def test_a_model_that_cannot_have_a_mixed_cache(tmp_path: Path, zoo_path, test: str) -> None:
    """Latent attention has one row, of one type, for keys and values."""
    small = ["--depths", "256", "--n-prompt", "8", "--n-gen", "2", "--flash-attn", "on"]
    small += ["--repeats", "1"] if test == "speed" else []
    model = ["-m", str(zoo_path("deepseek2"))]
    kv = ["--kv", "mixed:balanced", "--kv", "f16"]
    rows = by_kv(run(tmp_path / "s.json", test, *model, *kv, *small)["rows"])
    assert re.search("deepseek2.*MLA", rows["mixed:balanced"]["error"])
    assert "error" not in rows["f16"]


def test_a_cache_of_another_layout_is_filled_by_decoding(tmp_path: Path, zoo_path) -> None:
    small = ["--depths", "100", "--repeats", "1", "--n-prompt", "8", "--n-gen", "2", "--flash-attn", "on"]
    path = str(zoo_path("gpt-oss"))
    data = run(tmp_path / "s.json", "speed", "-m", path, "--kv", "f16", "--kv", MIXED, *small)
    assert [row["fill"] for row in data["rows"]] == ["real", "real"]
    assert all(row["tg_tps"] > 0 for row in data["rows"])


needs_stock = pytest.mark.skipif(
    stock_library() is None, reason="compares with llama-cpp-python, which is not installed: the extra `peer`"
)


@needs_stock
def test_the_stock_library_beside_ours(tmp_path: Path) -> None:
    small = ["--depths", "100", "--repeats", "2", "--n-prompt", "16", "--n-gen", "4", "--flash-attn", "on"]
    kv = ["--kv", "f16", "--kv", "q4_0", "--kv", MIXED]
    data = run(tmp_path / "p.json", "speed", "--peer", "--busy", "1", *kv, *small)
    peer, ours = (by_kv(data["rows"], engine=engine) for engine in ("llama_cpp", "mixedkv"))
    assert peer.keys() == {"f16", "q4_0"}  # it knows no mixed cache
    assert len(peer["q4_0"]["tg_samples"]) == 2
    assert peer["q4_0"]["tg_vs_uniform"] > 0
    assert peer["f16"]["tg_vs_stock"] == 1
    assert ours.keys() == {"f16", "q4_0", MIXED}
    assert ours[MIXED]["tg_vs_stock"] > 0
    assert {row["busy"] for row in data["rows"]} == {1}


def test_neighbours_compute_and_end() -> None:
    def ticks(pid: int) -> int:
        """Of the clock that it has computed: field 14 of proc(5)."""
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])

    with neighbours(2) as pids:
        wait_for(lambda: all(ticks(pid) > 0 for pid in pids))
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@needs_stock
def test_a_peer_that_dies_says_so() -> None:
    (setting,) = make_settings(["q4_0"])
    peer = Peer(read_model_file(model_path()))
    runner = peer.open(setting, SpeedWork(depth=0, n_prompt=8, n_gen=2, threads=1))
    assert min(runner.measure()) > 0
    os.kill(peer.pid, signal.SIGKILL)
    with pytest.raises(CannotRunError, match="died of signal 9"):
        runner.measure()
    runner.close()
    peer.close()


@pytest.mark.slow
def test_ctrl_c_leaves_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    command = [sys.executable, "-m", "mixedkv", "bench", "speed", "--kv", "q4_0", "--depths", "0,128"]
    endless = [
        "--repeats",
        "999999",
        "--n-prompt",
        "8",
        "--n-gen",
        "2",
        "--threads",
        "1",
        "--json",
        str(path),
    ]
    first = [*command[:-1], "0", "--repeats", "1", "--n-prompt", "8", "--n-gen", "2", "--threads", "1"]
    subprocess.run(first, check=True, capture_output=True)  # so that the second one starts at once
    began = time.monotonic()
    subprocess.run(first, check=True, capture_output=True)
    whole = time.monotonic() - began
    for n in (3, 10, 30):  # by then it has measured more than once, unless the machine has become slow
        path.unlink(missing_ok=True)
        process = subprocess.Popen(
            [*command, *endless], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        time.sleep(n * whole)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
        if path.exists() and any(len(row["tg_samples"]) > 1 for row in json.loads(path.read_text())["rows"]):
            break
    assert process.returncode == 130
    assert "Traceback" not in err
    data = json.loads(path.read_text())
    assert data["interrupted"] is True
    assert [row["depth"] for row in data["rows"]] == [0]
    assert len(data["rows"][0]["tg_samples"]) > 1
    assert "Interrupted" in out


def test_plots(quality: dict, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from mixedkv_bench.output import plots

    paths = plots.draw(Document.model_validate(quality), tmp_path)
    assert {path.name for path in paths} == {"frontier.png", "error-by-position.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


@pytest.mark.parametrize("preset", ["compact", "balanced", "quality"])
def test_presets(preset: str) -> None:
    kv = parse_kv(f"mixed:{preset}")
    assert parse_kv(str(kv)) == kv
    assert parse_kv(f"mixed:{preset},sinks=8,group=8") == replace(kv, sink_tokens=8, group_size=8)


def test_presets_cost_more_in_order() -> None:
    shape = model_shape(read_model_file(model_path()))
    bits = [footprint(shape, parse_kv(f"mixed:{x}"), 8192).bits_per_element for x in PRESETS]
    assert list(PRESETS) == ["compact", "balanced", "quality"]
    assert bits == sorted(bits)
    assert bits[-1] < 10
