"""Small runs of `mixedkv bench store`: what the rows say, and requests that cannot be met."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mixedkv.bundled import model_path
from mixedkv.cli import main
from mixedkv_bench.catalog import Document
from mixedkv_bench.harness.cache_settings import make_settings
from mixedkv_bench.harness.contexts import CannotRunError
from mixedkv_bench.harness.page_cache import drop_cached, resident_share
from mixedkv_bench.harness.store_run import StorePlace, StoreRun, in_new_process
from mixedkv_bench.store import TIERS, StoreWork, TierTimes, _rows
from support.bench_support import by_kv, run

pytestmark = pytest.mark.nightly

MIXED = "mixed:compact"
N_PROMPT, N_NEW, N_GEN, TURNS = 400, 8, 5, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("bench") / "s.json"
    small = ["--n-prompt", str(N_PROMPT), "--n-new", str(N_NEW), "--n-gen", str(N_GEN)]
    small += ["--turns", str(TURNS), "--repeats", "2", "--flash-attn", "off", "--folder", str(folder)]
    return run(path, "store", "--kv", "f16", "--kv", MIXED, *small)


def test_a_row_for_every_tier(data: dict[str, Any], folder: Path) -> None:
    for kv in ("f16", MIXED):
        rows = [row for row in data["rows"] if row["test"] == "store" and row["kv"] == kv]
        assert [row["tier"] for row in rows] == [tier for tier in TIERS if tier != "remote"]
        for row in rows:
            if "error" in row:
                assert row["tier"] == "disk_dropped"  # a file system in memory
                continue
            assert len(row["ttft_samples"]) == 2
            assert 0 < row["ttft_low"] <= row["ttft"] <= row["ttft_high"]
            assert ("restore" in row) == (row["tier"] != "cold")
            assert row.get("restore", 0) < row["ttft"]
            assert ("save" in row) == (row["tier"] in ("ram", "disk", "encrypted"))
            assert ("start" in row) == (row["tier"] == "new_process")
            assert ("vs_disk" in row) == (row["tier"] == "encrypted")
        assert rows[0]["vs_cold"] == 1
    assert list(folder.iterdir()) == []  # nothing is left behind


def test_bytes_are_those_of_the_rows(data: dict[str, Any]) -> None:
    per_token = 6 * 2 * 2 * 64  # elements: layers, K and V, heads, size
    n = N_PROMPT - N_NEW
    disk = by_kv(data["rows"], tier="disk")
    rows = n * per_token * 2
    assert rows < disk["f16"]["saved_bytes"] < 1.05 * rows
    assert disk["f16"]["bytes_vs_f16"] == 1
    mixed = (n * 4.5 / 8 + 68 * 2) * per_token  # 64 rows of the window and 4 sinks in F16
    assert disk[MIXED]["saved_bytes"] == pytest.approx(mixed, rel=0.1)
    assert disk[MIXED]["bytes_vs_f16"] == disk[MIXED]["saved_bytes"] / disk["f16"]["saved_bytes"]
    assert by_kv(data["rows"], tier="encrypted")["f16"]["saved_bytes"] > disk["f16"]["saved_bytes"]


def test_a_turn_evaluates_its_message(data: dict[str, Any]) -> None:
    for row in by_kv(data["rows"], test="chat").values():
        first, *later = row["turns"]
        assert first["n_message"] == first["n_evaluated"] == first["n_prompt"] == N_PROMPT // 2
        assert [turn["turn"] for turn in later] == list(range(2, TURNS + 1))
        for i, turn in enumerate(later, 1):
            assert turn["n_message"] == N_NEW
            assert turn["n_evaluated"] == N_NEW + 1  # the last token of the answer before
            assert turn["n_prompt"] == N_PROMPT // 2 + i * (N_NEW + N_GEN)
            assert turn["ttft"] > 0


def test_the_tables(data: dict[str, Any]) -> None:
    from mixedkv_bench.output.report import render

    text = render(Document.model_validate(data))
    assert re.search(r"Kept KV: a prompt of 400 tokens.*\n.*\n  f16 no flash, cold +[\d.]+", text)
    assert re.search(rf"{MIXED}, disk +[\d.]+.* 4\d\.\d%", text)
    assert re.search(rf"{MIXED} +tokens evaluated +200 +9 +9$", text)


def test_plots(data: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from mixedkv_bench.output import plots

    paths = plots.draw(Document.model_validate(data), tmp_path)
    assert {path.name for path in paths} == {"store.png", "chat.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_ratios_are_taken_within_a_round() -> None:
    times = {tier: TierTimes(ttft=[1.0, 2.0, 4.0]) for tier in TIERS}
    times["encrypted"] = TierTimes(ttft=[2.0, 4.0, 8.0])
    times["cold"] = TierTimes(ttft=[10.0, 20.0, 40.0])
    head = {"kv": "f16", "flash_attn": False, "threads": 1}
    work = StoreWork(n_prompt=8, n_new=1, n_gen=1, turns=1, threads=1, repeats=3)
    rows = {row.tier: row for row in _rows(times, head, work, 0)}
    assert rows["disk"].vs_cold == pytest.approx(0.1)
    assert rows["encrypted"].vs_disk == 2


def test_files_that_were_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(2**20))
    assert resident_share(path) == 1
    if not drop_cached([path]):
        pytest.skip("the temporary folder is in memory, or the system keeps files")
    assert resident_share(path) < 0.05
    path.read_bytes()
    assert resident_share(path) == 1


@pytest.fixture(scope="module")
def q8_0() -> Any:
    (setting,) = make_settings(["q8_0"])
    with StoreRun(model_path(), setting, 256, 1) as made:
        yield made


def test_a_miss_is_no_hit(q8_0: StoreRun, tmp_path: Path) -> None:
    """What was not restored as wanted must not be measured as if it were."""
    tokens = np.arange(1, 40, dtype=np.int32)
    with StorePlace(tmp_path / "kv") as place:
        with pytest.raises(CannotRunError, match=r"restored 0 tokens from none .* instead of 30 from disk"):
            place.restore(q8_0, tokens, 30)
        with pytest.raises(CannotRunError, match="nothing was restored"):
            in_new_process(q8_0, place, tokens)
        q8_0.clear()
        q8_0.first_token(tokens[:30])
        assert place.save(q8_0, tokens[:30]) > 0
        q8_0.clear()
        assert place.restore(q8_0, tokens, 30) == 30
        assert min(in_new_process(q8_0, place, tokens)) > 0
        place.empty()
        assert place.files() == []


def test_a_model_that_cannot_have_the_cache(tmp_path: Path, zoo_path) -> None:
    """Heads of 48 elements do not fit the block of 32 of the quantised types."""
    small = ["--n-prompt", "64", "--n-gen", "2", "--turns", "2", "--repeats", "1", "--flash-attn", "off"]
    model = ["-m", str(zoo_path("llama-48"))]
    data = run(tmp_path / "s.json", "store", *model, "--kv", "q4_0", "--kv", "f16", *small)
    failed = [row for row in data["rows"] if row["kv"] == "q4_0"]
    assert len(failed) == 1
    assert re.search(r"block|multiple|divisible|packs", failed[0]["error"])
    assert all(
        "ttft" in row or row["tier"] == "disk_dropped"
        for row in data["rows"]
        if row.get("tier") and row["kv"] == "f16"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--n-prompt", "16", "--n-new", "16"], "--n-new 16 leaves nothing of --n-prompt 16"),
        (["--n-new", "0"], "argument --n-new"),
        (["--turns", "0"], "argument --turns"),
        (["--folder", "no/such/folder"], "--folder no/such/folder cannot be written"),
        (["--kv", "q3"], "kv='q3' names no cache"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    try:
        code = main(["bench", "store", *arguments])
    except SystemExit as end:  # argparse
        code = end.code
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.bench
def test_a_hit_is_much_faster_than_a_cold_prompt(tmp_path: Path) -> None:
    small = ["--n-prompt", "4096", "--turns", "2", "--repeats", "5", "--flash-attn", "off"]
    rows = run(tmp_path / "s.json", "store", "--kv", "f16", "--kv", MIXED, *small)["rows"]
    for kv in ("f16", MIXED):
        tiers = {row["tier"]: row for row in rows if row["test"] == "store" and row["kv"] == kv}
        assert tiers["ram"]["vs_cold"] < 0.05
        assert tiers["disk"]["vs_cold"] < 0.10
        assert tiers["encrypted"]["vs_disk"] < 1.15
    assert by_kv(rows, tier="disk")[MIXED]["bytes_vs_f16"] < 0.35
