"""`mixedkv bench quick`: one table in about two minutes, and advice that follows from it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mixedkv.cli import main
from mixedkv_bench import quick, speed
from mixedkv_bench import run as bench_run
from mixedkv_bench.quick import QuickRow, advise, make_plan
from support.bench import run

pytestmark = pytest.mark.full


def row(kv: str, bits: float, same: float | None, speed: float | None = 1.0, **more: Any) -> QuickRow:
    return QuickRow(
        kv=kv,
        flash_attn=True,
        threads=1,
        n_ctx=512,
        bits_per_element=bits,
        same_top1=same,
        kld_mean=None if same is None else 1 - same,
        tg_vs_f16=speed,
        **more,
    )


def advice(*rows: QuickRow) -> dict[str, str]:
    return {each.kv: each.advice for each in advise(rows) if each.advice}


def test_the_advice_is_the_smallest_cache_that_keeps_enough() -> None:
    rows = [
        row("f16", 16, 0.999),
        row("q8_0", 8.5, 0.995),
        row("balanced", 6.5, 0.991),
        row("q4_0", 4.5, 0.9),
    ]
    assert advice(*rows) == {"balanced": "use this"}
    assert advice(*rows, row("compact", 4.7, 0.96)) == {
        "balanced": "use this",
        "compact": "if memory is short",
    }


def test_a_slow_cache_is_for_short_memory_only() -> None:
    rows = [row("f16", 16, 1.0), row("q8_0", 8.5, 1.0, speed=0.5)]
    assert advice(*rows) == {"f16": "use this", "q8_0": "if memory is short"}


def test_what_f16_itself_changes_counts_for_nobody() -> None:
    assert advice(row("f16", 16, 0.97), row("q8_0", 8.5, 0.965)) == {"q8_0": "use this"}


def test_a_setting_that_cannot_run_is_no_advice() -> None:
    assert advice(row("mixed", 4.5, None, None, error="no"), row("f16", 16, 1.0)) == {"f16": "use this"}
    assert advice() == {}


@pytest.mark.parametrize("prompt", [2.0, 30.0, 300.0, 30_000.0])
def test_the_plan_fits_two_minutes_where_that_can_be(prompt: float) -> None:
    options: Any = SimpleNamespace(settings=range(6), shape=SimpleNamespace(n_ctx_train=8192))
    plan = make_plan(options, prompt, prompt / 10)
    assert 1024 <= plan.n_text <= 2048
    assert 4 <= plan.n_gen <= 32
    assert plan.n_text % 256 == 0
    assert plan.depth == 4096
    if prompt >= 300:
        assert plan.seconds <= 120
    else:
        assert (plan.n_text, plan.n_gen) == (1024, 4)  # the least that says anything


def test_a_short_context_is_not_exceeded() -> None:
    options: Any = SimpleNamespace(settings=range(6), shape=SimpleNamespace(n_ctx_train=256))
    plan = make_plan(options, 1000.0, 100.0)
    assert (plan.n_text, plan.depth) == (256, 0)


def test_quick_on_the_bundled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quick, "_SECONDS", 1.0)
    monkeypatch.setattr(quick, "_DEPTH", 512)
    rows = run(tmp_path / "q.json", "quick", "--kv", "f16", "--kv", "mixed:quality")
    shown = capsys.readouterr()
    assert "this takes about 1 min" in shown.err
    assert re.search(r"^text read with each of 3 caches: (\d+) of \1 tokens$", shown.err, re.M)
    for name in ("f16 flash", "mixed:quality"):  # each number when it is there, and the table at the end
        assert re.search(rf"^{name}: [\d.]+ bits, same top [\d.]+%, KLD mean ", shown.err, re.M)
        assert re.search(rf"^{name}: about \d+ prompt tok/s, [\d.]+ text tok/s$", shown.err, re.M)
    assert "use this" in shown.out
    f16, mixed = rows
    assert (f16["kv"], mixed["kv"]) == ("f16", "mixed:quality")
    assert f16["flash_attn"]  # one way: people ask which cache, not which attention
    for each in (f16, mixed):
        assert "error" not in each, each["error"]
        assert each["test"] == "quick"
        assert each["same_top1"] > 0.8
        assert each["n_positions"] >= 500
        assert each["depth"] == 512
        assert min(each["pp_tps"], each["tg_tps"], each["tg_vs_f16"]) > 0
        assert each["longest_n_ctx"] > 512
    assert mixed["bits_per_element"] < f16["bits_per_element"]


def test_ctrl_c_leaves_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quick, "_SECONDS", 1.0)
    monkeypatch.setattr(speed, "_take_turns", interrupted)
    path = tmp_path / "q.json"
    assert (
        main(["bench", "quick", "--kv", "f16", "--kv", "q4_0", "--threads", "1", "--json", str(path)]) == 130
    )
    rows = [json.loads(line) for line in path.read_text().splitlines()][1:]
    assert [row["kv"] for row in rows] == ["f16", "q4_0"]
    for row in rows:
        assert row["same_top1"] > 0.5
        assert "tg_tps" not in row
        assert not row.get("advice")  # which needs the speed
    shown = capsys.readouterr()
    assert "interrupted: this is what was measured until then" in shown.err
    assert re.search(r"^  q4_0 +4\.50 ", shown.out, re.M)


def test_a_machine_slower_than_planned_ends_the_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quick, "_SECONDS", 1.0)
    monkeypatch.setattr(quick, "_DEPTH", 64)
    monkeypatch.setattr(quick, "_LATE", 0.0)
    (row,) = run(tmp_path / "q.json", "quick", "--kv", "q4_0")
    assert row["tg_tps"] > 0
    assert "1 of 3 rounds were measured" in capsys.readouterr().err


@pytest.mark.parametrize(("load", "warns"), [(0.1, False), (100.0, True)])
def test_a_busy_machine_is_said_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], load: float, warns: bool
) -> None:
    def nothing(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    monkeypatch.setitem(bench_run.TESTS, "quick", replace(quick.TEST, measure=nothing))
    assert main(["bench", "quick", "--kv", "f16"]) == 130
    assert ("this machine is busy (load 100.0 on " in capsys.readouterr().err) == warns
