"""`mixedkv bench reuse`: what its rows say."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from mixedkv.cli.main import main
from mixedkv.llama import Llama
from mixedkv_bench.harness import real_text
from mixedkv_bench.harness.contexts import CannotRunError
from mixedkv_bench.harness.reuse_cases import DONORS, WORKLOADS, CaseMaker
from mixedkv_bench.harness.summary import ratio_interval
from support.bench import run

pytestmark = pytest.mark.nightly

KV = "mixed:cold=q8_0"
KINDS = [(workload, donor) for workload in WORKLOADS for donor in DONORS[workload]]


@pytest.mark.needs("real model")
@pytest.mark.slow
def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("real_model_q4_1")  # skips without the extra, which has the texts
    rows = run(tmp_path / "r.json", "reuse", "--kv", KV, "--repeats", "1", "--n-prompt", "500")
    full = [row for row in rows if row["method"] == "full"]
    assert [(row["workload"], row["donor"]) for row in full] == KINDS
    for row in rows:
        assert row["n_cases"] == 1
        if row["method"] == "full":
            assert (row["kld_mean"], row["evaluated"], row["approximate"]) == (0, 1, 0)
            assert row["repaired"] == 0
        elif row["method"] == "none":  # the first turn of a history is too short to be reused
            assert row["approximate"] > 0.2 or row["workload"] == "system"
            assert row["evaluated"] + row["approximate"] <= 1.001  # the rest was cached exactly
            assert row.get("kld_of_none") in (1, None)  # None: without any divergence
    assert "Passages reused in another place" in capsys.readouterr().out


@pytest.mark.slow
def test_what_was_asked_for_is_measured(tmp_path: Path) -> None:
    flags = ["--workload", "edited", "--documents", "2", "--repair", "seam", "--repair", "query"]
    rows = run(tmp_path / "r.json", "reuse", "--kv", KV, "--repeats", "2", "--n-prompt", "300", *flags)
    assert [(row["workload"], row["method"]) for row in rows] == [
        ("edited", method) for method in ("full", "seam", "query")
    ]
    assert all(row.get("kld_of_none") is None for row in rows)  # which was not measured
    for row in rows:
        assert row["cpu_vs_cold"] == 1 if row["method"] == "full" else row["cpu_vs_cold"] > 0


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--json", "no/such/folder/r.json"], "cannot be written"),
        (["--n-prompt", "100"], "256 or more"),
        (["--workload", "poems"], "invalid choice: 'poems'"),
        (["--documents", "1"], "2 or more"),
        (["--workload", "few_shot", "--donor", "alone"], "no rows of this donor"),
    ],
)
def test_bad_flags(flags: list[str], match: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        raise SystemExit(main(["bench", "reuse", *flags]))
    assert match in capsys.readouterr().err


def make_cases(llm: Llama, n_prompt: int) -> CaseMaker:
    def encode(text: str) -> list[int]:
        return llm.tokenize(text.encode(), add_bos=False, special=True) if text else []

    return CaseMaker(encode, llm.tokenize(b""), n_prompt)


@pytest.mark.needs("real model")
def test_cases_have_what_was_stored_at_another_place(llm: Llama, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("real_model_q4_1")  # skips without the extra, which has the texts
    maker = make_cases(llm, 600)
    for workload, donor in KINDS:
        case = maker.make(workload, donor, 4)
        again = maker.make(workload, donor, 4)
        assert np.array_equal(case.prompt, again.prompt)
        assert 300 < len(case.prompt) < 800
        is_real = workload in real_text.KINDS
        assert bool(case.answer) != is_real
        assert not any(np.array_equal(case.prompt, stored) for stored in case.stored)
        known = {tuple(stored[i : i + 12]) for stored in case.stored for i in range(len(stored) - 12)}
        windows = [tuple(case.prompt[i : i + 12]) in known for i in range(len(case.prompt) - 12)]
        assert np.mean(windows) > (0.2 if is_real else 0.5), workload  # a long instruction is new
        json.dumps(case.answer)


def test_a_text_that_is_missing_or_too_short_is_refused(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    def files(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(real_text.metadata, "files", files)
    with pytest.raises(CannotRunError, match=r"mixedkv\[real\]"):
        make_cases(llm, 600).make("narrative", "alone", 0)
    with pytest.raises(CannotRunError, match="smaller --n-prompt"):
        make_cases(llm, 600_000).make("prose", "alone", 0)


def test_the_share_of_none_has_an_interval() -> None:
    none, query = [1.0, 2.0, 3.0, 4.0], [0.1, 0.5, 0.6, 0.9]
    low, high = ratio_interval(query, none)
    assert 0.1 < low < sum(query) / sum(none) < high < 0.25
    assert ratio_interval(none, none) == (1, 1)
