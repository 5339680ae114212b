"""`mixedkv bench quick`: one table in about two minutes, and advice that follows from it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mixedkv_bench import quick
from mixedkv_bench.quick import QuickRow, advise, make_plan
from support.bench_support import run


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
        row("f16", 16, 0.999), row("q8_0", 8.5, 0.995), row("balanced", 6.5, 0.991), row("q4_0", 4.5, 0.9),
    ]  # fmt: skip
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
