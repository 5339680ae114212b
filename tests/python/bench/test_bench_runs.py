"""Small runs of `mixedkv bench` on the bundled model: what the rows and the tables say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mixedkv import _core
from mixedkv.bundled import model_path
from mixedkv.config import PRESETS, MixedKVConfig, parse_kv
from mixedkv.model.footprint import footprint, model_shape
from mixedkv.model.gguf_file import read_model_file
from mixedkv.model.layer_plan import LayerPlan
from mixedkv.model.measured_shares import read_shares
from mixedkv_bench.harness.cache_settings import DEFAULT_SPECS, make_settings
from mixedkv_bench.output import read_result
from support.bench import Row, by_kv, run
from support.patience import PATIENCE

pytestmark = pytest.mark.nightly

MIXED = "mixed:threshold=64,group=16"
WIDE = "mixed:threshold=256,group=32,sinks=0"
SHAPE = model_shape(read_model_file(model_path()))


def test_the_default_settings() -> None:
    """F16 with and without flash attention, two of llama.cpp's quantised caches, three presets."""
    settings = make_settings(DEFAULT_SPECS)
    assert [s.flash_attn for s in settings if s.is_f16] == [False, True]
    assert {s.spec for s in settings if not s.is_f16 and s.is_peer} == {"q8_0", "q4_0"}
    assert sum(isinstance(s.kv, MixedKVConfig) for s in settings) == 3
    assert len({s.name for s in settings}) == len(settings) == 7


def test_products_are_compared_with_the_weights_in_f16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run(tmp_path / "p.json", "products", "--repeats", "1", "--threads", "1")
    in_bf16 = ["mixedkv, BF16"] if _core.version()["isa"] == "amx" else []
    assert [(row["products"], row["mode"]) for row in rows] == [
        (maker, mode) for maker in ("mixedkv", "llama.cpp", *in_bf16) for mode in ("batch", "token")
    ]
    for row in rows:
        assert (row["kv"], row["n_ctx"], row["n_positions"]) == ("f16", 256, 255)
        assert 1e-7 < row["kld_mean"] < 0.1, "a product of 8 bits rounds, and little"
    batch = {row["products"]: row["kld_mean"] for row in rows if row["mode"] == "batch"}
    assert batch["mixedkv"] != batch["llama.cpp"]
    assert all(batch[maker] < batch["mixedkv"] / 2 for maker in in_bf16)
    assert "against the same weights in F16, 256 tokens" in capsys.readouterr().out


def test_sensitivity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.json"
    rows = run(path, "sensitivity", "--n-ctx", "512", "--repeats", "1", "--bits", "5,6", "--threads", "1")
    layers = [row for row in rows if "layer" in row]
    assert [(row["layer"], row["part"]) for row in layers] == [(il, part) for il in range(6) for part in "kv"]
    assert layers[3]["kv"] == "mixed:cold=q8_0,layers=1:q8_0/q4_0"
    shares = read_shares(path)
    assert sum(shares.values()) > 0
    chosen = rows[len(layers) :]
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
    assert re.search(r"q4_0 in K or V of one layer\n.*\n  0 K +[\d.e-]+", shown)
    assert re.search(r"types of least divergence\n.*\n  mixed:\S+ +[45]\.\d\d", shown)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "Expecting"), ("[]", "no attribute"), ('{"schema": "mixedkv.bench/2"}', "no share of each layer")],
)
def test_shares_of_another_file(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_shares(path)


def test_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--repeats", "3", "--n-prompt", "32", "--n-gen", "4", "--depths", "0,300"]
    rows = run(tmp_path / "s.json", "speed", "--kv", "f16", "--kv", "q4_0", "--kv", MIXED, *small)
    assert {(row["kv"], row["flash_attn"], row["depth"]) for row in rows} == {
        (kv, flash, depth)
        for kv, flash in (("f16", False), ("f16", True), ("q4_0", True), (MIXED, True))
        for depth in (0, 300)
    }
    for row in rows:
        assert len(row["tg_samples"]) == 3
        assert 0 < min(row["tg_samples"]) <= row["tg_tps"] <= max(row["tg_samples"])
        assert row["fill"] == ("synthetic" if row["depth"] else "real")
        assert row["attention"] == ("fused" if row["kv"] == MIXED else "llama.cpp")
    f16 = [row for row in rows if row["kv"] == "f16" and row["depth"] == 300]
    assert max(f16, key=lambda row: row["pp_tps"])["pp_vs_f16"] == 1
    assert by_kv(rows, kv="q4_0", depth=300)["q4_0"]["tg_vs_uniform"] == 1
    out, err = capsys.readouterr()
    assert err == ""  # no progress bar where there is no terminal
    assert re.search(r"Speed at a depth of 300 tokens\n.*\n  f16 no flash +llama.cpp +[\d.]+", out)


@pytest.fixture(scope="module")
def quality(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    path = tmp_path_factory.mktemp("bench") / "q.json"
    specs = [x for spec in ("f16", "q4_0", MIXED, WIDE) for x in ("--kv", spec)]
    return run(path, "quality", *specs, "--n-ctx", "512", "--repeats", "1", "--flash-attn", "off")


@pytest.mark.parametrize("mode", ["batch", "token"])
def test_quality(quality: list[Row], mode: str) -> None:
    rows = by_kv(quality, mode=mode)
    control = rows.pop("f32")
    assert control["control"] is True
    assert control["kld_max"] == 0
    assert control["same_top1"] == control["ppl_ratio"] == 1
    assert 0 < rows["f16"]["kld_mean"] < min(rows[MIXED]["kld_mean"], rows["q4_0"]["kld_mean"])
    assert rows["f16"]["kld_median"] < rows[MIXED]["kld_median"] < rows["q4_0"]["kld_median"]
    for row in rows.values():
        assert row["n_positions"] == 255  # the second half, whose last token has none to follow
        assert row["kld_median"] <= row["kld_p99"] <= row["kld_p999"] <= row["kld_max"]


def test_a_window_of_half_the_context_is_nearer_to_f16(quality: list[Row]) -> None:
    rows = by_kv(quality, mode="token")
    assert rows["f16"]["kld_mean"] < rows[WIDE]["kld_mean"] < rows[MIXED]["kld_mean"]


def test_quality_on_a_text_of_ones_own(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Ada's kite is red. The code of the mill is 4817. " * 60)
    options = ["--kv", "q8_0", "--text", str(text), "--n-ctx", "256", "--mode", "batch"]
    rows = run(tmp_path / "q.json", "quality", *options)
    assert by_kv(rows)["q8_0"]["n_positions"] % 127 == 0  # several documents, each by its second half


def test_what_the_model_cannot_run_is_a_row_that_says_why(tmp_path: Path, zoo_path) -> None:
    """Heads of 48 elements do not fit the block of 32 of the quantised types."""
    model = ["-m", str(zoo_path("llama-48"))]
    small = ["--depths", "0", "--repeats", "1", "--n-prompt", "8", "--n-gen", "2", "--flash-attn", "on"]
    kv = ["--kv", "mixed", "--kv", "q4_0", "--kv", "f16"]
    rows = by_kv(run(tmp_path / "s.json", "speed", *model, *kv, *small))
    assert "tg_tps" in rows["f16"]
    assert "error" not in rows["f16"]
    for kv in ("mixed", "q4_0"):
        assert "tg_tps" not in rows[kv]
        assert re.search(r"block|multiple|divisible|packs", rows[kv]["error"]), rows[kv]["error"]


def test_a_cache_of_another_layout_is_filled_by_decoding(tmp_path: Path, zoo_path) -> None:
    small = ["--depths", "100", "--repeats", "1", "--n-prompt", "8", "--n-gen", "2", "--flash-attn", "on"]
    path = str(zoo_path("gpt-oss"))
    rows = run(tmp_path / "s.json", "speed", "-m", path, "--kv", "f16", "--kv", MIXED, *small)
    assert [row["fill"] for row in rows] == ["real", "real"]
    assert all(row["tg_tps"] > 0 for row in rows)


@pytest.mark.slow
def test_ctrl_c_leaves_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    command = [sys.executable, "-m", "mixedkv", "bench", "speed", "--kv", "q4_0", "--depths", "0,128"]
    small = ["--n-prompt", "8", "--n-gen", "2", "--threads", "1"]
    endless = ["--repeats", "999999", *small, "--json", str(path)]
    first = [*command[:-1], "0", "--repeats", "1", *small]
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
        rows = read_result(path)[1] if path.exists() else []
        if rows and len(rows[0].tg_samples or ()) > 1:
            break
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "interrupted: this is what was measured until then" in err
    assert [row.depth for row in rows] == [0]
    assert "Speed at a depth of 0 tokens" in out


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
