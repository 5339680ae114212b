"""A small run of `mixedkv bench speculation`, and the model it is meant for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.engine.draft.speculation import StepTime
from support.bench_support import run
from support.tools import padded_model

pytestmark = pytest.mark.nightly


@pytest.fixture
def _drafts_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else this machine does: how many are made depends on what they are measured to cost."""
    monkeypatch.setattr(StepTime, "line", lambda _: (1.0, 0.05))


@pytest.mark.usefixtures("_drafts_cost_little")
def test_speculation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--repeats", "2", "--n-gen", "48", "--depths", "512"]
    rows = run(tmp_path / "s.json", "speculation", "--kv", "mixed", *small)["rows"]
    repeats, certain, _, unlike = rows
    assert [row["text"] for row in rows] == ["repeats", "is certain", "goes on", "is unlike"]
    assert certain["accepted"] > certain["drafted"] / 3
    assert repeats["accepted"] > unlike["accepted"]
    assert repeats["steps"] < unlike["steps"] <= 1
    assert "Drafts, text that repeats" in capsys.readouterr().out


@pytest.mark.usefixtures("_drafts_cost_little")
def test_a_draft_model(tmp_path: Path) -> None:
    """One that says what the model says, so that all it is sure of comes."""
    small = ["--repeats", "1", "--n-gen", "48", "--depths", "256", "--draft-model", str(model_path())]
    rows = run(tmp_path / "s.json", "speculation", "--kv", "mixed", *small)["rows"]
    goes_on = rows[2]
    assert goes_on["draft_model"]
    assert goes_on["drafted"] > 10
    assert goes_on["accepted"] > 0.6 * goes_on["drafted"]  # the first of near equals may be another one


def test_a_padded_model_says_what_the_bundled_one_says(tmp_path: Path) -> None:
    padded_model.write(tmp_path / "padded.gguf", 256)
    found = []
    for path in (model_path(), tmp_path / "padded.gguf"):
        options = {
            "n_ctx": 256,
            "n_threads": 1,
            "verbose": False,
            "logits_all": True,
            "rope_freq_base": 500_000.0,
        }
        with Llama(path, kv="f16", **options) as llm:
            llm.eval(list(range(20, 80)))
            found.append(llm.scores[59].copy())
    assert np.abs(found[0] - found[1]).max() < 1e-3 < np.abs(found[0]).max()
