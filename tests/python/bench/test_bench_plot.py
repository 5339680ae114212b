"""`mixedkv bench --plot`: a picture of the rows, refused before anything is measured; what pandas reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from mixedkv.cli import main
from mixedkv_bench import plot
from support.bench import run

pytestmark = pytest.mark.full

SMALL = ["--n-prompt", "32", "--n-gen", "2", "--repeats", "1"]
TEXTS = ["--n-ctx", "512", "--repeats", "1"]


@pytest.mark.needs("matplotlib")
@pytest.mark.parametrize(
    "test",
    [
        ["speed", "--kv", "f16", "--kv", "q4_0", "--depths", "0,64", *SMALL],
        ["quality", "--kv", "q8_0", "--kv", "q4_0", "--mode", "batch", *TEXTS],
        ["sensitivity", "--bits", "6", *TEXTS],
    ],
    ids=lambda test: test[0],
)
def test_rows_are_drawn(tmp_path: Path, test: list[str]) -> None:
    path = tmp_path / "rows.svg"
    rows = run(tmp_path / "rows.json", *test, "--plot", str(path))
    drawn = path.read_text("utf-8")
    assert drawn.count("<use ") > len(rows) / 2  # marks and ticks
    assert path.stat().st_size > 10_000


@pytest.mark.needs("matplotlib")
def test_a_png_is_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.png"
    run(tmp_path / "rows.json", "speed", "--kv", "q4_0", "--depths", "0", *SMALL, "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("rows.jpg", "rows.jpg: give a file that ends in .png, .svg, .pdf"),
        ("none/rows.png", "none/rows.png cannot be written: No such file or directory"),
    ],
)
def test_a_bad_name_is_refused_before_anything_is_measured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    problem: str,
) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda _: True)
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "quick", "--plot", name]) == 2
    assert f"error: --plot {problem}" in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda _: None)
    assert main(["bench", "quick", "--plot", "rows.png"]) == 2
    assert "--plot needs matplotlib, which is not installed: pip install 'mixedkv[plot]'" in (
        capsys.readouterr().err
    )


def test_questions_have_no_plot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda _: True)
    assert main(["bench", "quality", "--task", "recall", "--plot", str(tmp_path / "a.png")]) == 2
    assert "--plot draws divergences, and --task counts answers" in capsys.readouterr().err


def test_pandas_reads_past_the_first_line(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="needs the package pandas")
    path = tmp_path / "rows.json"
    rows = run(path, "speed", "--kv", "f16", "--kv", "q4_0", "--depths", "0", *SMALL)
    table = pandas.read_json(path, lines=True)
    table = table[table.test != "run"]
    assert table.kv.tolist() == [row["kv"] for row in rows]
    with path.open() as file:
        next(file)
        past = pandas.read_json(file, lines=True)
    assert set(past.columns) == set().union(*rows)
    assert past.tg_tps.tolist() == pytest.approx([row["tg_tps"] for row in rows])
