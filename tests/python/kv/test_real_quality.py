"""What is claimed of the caches' quality, on a real model and real text: bounds with room for other text."""

from __future__ import annotations

from pathlib import Path

import pytest

from mixedkv.cli import main
from mixedkv_bench.output import read_result
from mixedkv_bench.quality import QualityRow
from support.cache.hidden import hidden

pytestmark = [pytest.mark.slow, pytest.mark.needs("real model")]

BARE = "threshold=0,group=1,sinks=0"


def divergence(tmp_path: Path, model: Path, text: str, n_ctx: int, specs: list[str]) -> dict[str, QualityRow]:
    """Rows of `mixedkv bench quality` by their specs."""
    path = tmp_path / "quality.json"
    kinds = [word for spec in specs for word in ("--kv", spec)]
    asked = ["bench", "quality", "-m", str(model), "--text", text, "--n-ctx", str(n_ctx), "--repeats", "1"]
    how = ["--mode", "batch", "--flash-attn", "off", "--threads", "2", "--json", str(path)]
    assert main([*asked, *how, *kinds]) == 0
    _, rows = read_result(path)
    return {row.kv: row for row in rows if isinstance(row, QualityRow)}


def mean(row: QualityRow) -> float:
    assert row.kld_mean is not None
    return row.kld_mean


def test_prose(real_model: Path, tmp_path: Path) -> None:
    """Without its window of 32 tokens in F16, a mixed cache is about as far off as q4_0 on this text."""
    specs = ["q4_0", "mixed", f"mixed:{BARE}", "mixed:cold=lm4"]
    rows = divergence(tmp_path, real_model, "prose", 1024, specs)
    q4_0 = mean(rows["q4_0"])
    assert rows["f32"].kld_mean == 0
    assert mean(rows["mixed"]) < 0.35 * q4_0
    assert mean(rows["mixed:cold=lm4"]) < 0.35 * q4_0
    assert 0.5 * q4_0 < mean(rows[f"mixed:{BARE}"]) < 2 * q4_0
    assert rows["mixed"].text.startswith("prose: pydoc_data.topics of Python ")


def test_outliers_in_keys(real_model_planted: Path, tmp_path: Path) -> None:
    """As on the plain model; q4_0 has nothing left."""
    rows = divergence(tmp_path, real_model_planted, "prose", 512, ["q4_0", "mixed"])
    with hidden(equalize="0"):
        (bare,) = divergence(tmp_path, real_model_planted, "prose", 512, ["mixed"]).values()
    assert mean(rows["q4_0"]) > 1
    assert mean(rows["mixed"]) < 0.03
    assert mean(bare) > 10 * mean(rows["mixed"])
