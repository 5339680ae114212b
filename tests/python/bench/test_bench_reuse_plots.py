"""Pictures of `mixedkv bench reuse`, from rows that were made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mixedkv_bench.reuse import ReuseRow

pytestmark = pytest.mark.nightly

METHODS = {"full": 1.0, "none": 0.1, "seam": 0.2, "cacheblend": 1.1, "query": 0.2, "kvboost": 0.6}


def row(workload: str, method: str, n: int) -> ReuseRow:
    samples = METHODS[method] * np.linspace(1, 3, n)
    known: dict[str, Any] = {"workload": workload, "donor": "conversation", "method": method}
    return ReuseRow.model_validate(
        {
            **known,
            "kv": "mixed:cold=q8_0",
            "flash_attn": True,
            "threads": 1,
            "ratio": 0.0,
            "overlap_k": 0,
            "n_cases": n,
            "n_prompt": 600,
            "ttft": float(np.median(samples)),
            "ttft_samples": samples.tolist(),
            "vs_cold": METHODS[method],
            "kld_first": 0.0 if method == "full" else 1e-4 * METHODS[method],
        }
    )


def test_a_picture_of_cost_and_one_of_each_turn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from mixedkv_bench.output import plots, plots_reuse

    rows = [row(workload, method, 10) for workload in ("documents", "system") for method in METHODS]
    found = dict(plots_reuse.figures(rows, "a model", plots._figure))
    assert list(found) == ["reuse", "reuse-ttft"]
    assert len(found["reuse-ttft"].axes) == 5
    for axis in found["reuse-ttft"].axes:
        shares = [line.get_ydata() for line in axis.lines]
        assert len(shares) == len(METHODS)
        assert all(each[-1] == 1 and (np.diff(each) >= 0).all() for each in shares)
    for name, figure in found.items():
        figure.savefig(tmp_path / f"{name}.png")
    few = [row("system", "full", 3)]
    assert list(dict(plots_reuse.figures(few, "a model", plots._figure))) == ["reuse"]
    assert dict(plots_reuse.figures([], "a model", plots._figure)) == {}
