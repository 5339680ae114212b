"""The picture of divergence against bits, from rows that were made up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from mixedkv_bench.catalog import Document
from mixedkv_bench.harness.row import Row
from mixedkv_bench.quality import QualityRow
from mixedkv_bench.recall import RecallRow

pytestmark = pytest.mark.nightly

BITS = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5, "mixed:quality": 9.6, "mixed:cold=lm4": 4.4}
KLD = {"f16": 1e-7, "q8_0": 1e-5, "q4_0": 1e-3, "mixed:quality": 1e-6, "mixed:cold=lm4": 2e-4}
COMMON: dict[str, Any] = {"flash_attn": True, "threads": 1, "n_ctx": 4096}


def quality(kv: str, mode: str = "batch", times: float = 1.0, **other: Any) -> QualityRow:
    known = {"kv": kv, "mode": mode, "control": False, "bits_per_element": BITS[kv], **COMMON}
    return QualityRow.model_validate(
        {**known, "kld_mean": times * KLD[kv], "kld_median": times * KLD[kv] / 100, **other}
    )


def recall(kv: str, correct: int) -> RecallRow:
    part = {"depth": 900, "cold": True, "n": 100, "correct": correct, "low": 0.0, "high": 1.0}
    known = {"kv": kv, "control": False, "bits_per_element": BITS[kv], "recall": [part], **COMMON}
    return RecallRow.model_validate(known)


def all_quality(times: float = 1.0, mode: str = "batch") -> list[Row]:
    return [quality(kv, mode, times) for kv in BITS]


def draw(models: dict[str, list[Row]]) -> Any:
    """The figure, or None."""
    pytest.importorskip("matplotlib")
    from mixedkv_bench.output import plots, plots_frontier

    styles = plots._styles([row for rows in models.values() for row in rows])
    return dict(plots_frontier.figures(models, styles, "a model")).get("frontier")


def test_one_model_has_its_panels_side_by_side() -> None:
    figure = draw({"a model": all_quality()})
    assert [axis.get_ylabel() for axis in figure.axes] == [
        "mean KL divergence, nats",
        "median KL divergence, nats",
    ]
    assert {axis.get_xlabel() for axis in figure.axes} == {"allocated bits per element"}
    assert {axis.get_subplotspec().rowspan.start for axis in figure.axes} == {0}


def test_several_models_have_a_column_each_and_facts_found_a_row() -> None:
    found: list[Row] = [recall("q4_0", 3), recall("mixed:cold=lm4", 95)]
    figure = draw({"plain": all_quality(), "outliers": [*all_quality(), *found]})
    assert len(figure.axes) == 3 * 2
    assert [axis.get_title() for axis in figure.axes[:2]] == ["plain", "outliers"]
    assert figure.axes[4].get_ylabel() == "facts found, %"
    shown = {each.get_label(): each.lines[0].get_ydata()[0] for each in figure.axes[5].containers}
    assert shown == {"q4_0": 3, "mixed:cold=lm4": 95}
    (legend,) = figure.legends
    families = ["least of mixed caches", "least of llama.cpp's"]
    assert [text.get_text() for text in legend.get_texts()] == [*settings(figure), *families]


def settings(figure: Any) -> dict[str, None]:
    """The names of the points, in the order of the legend."""
    return dict.fromkeys(each.get_label() for axis in figure.axes for each in axis.containers)


def test_a_column_of_several_models_shows_the_middle_and_how_far_they_reach() -> None:
    pytest.importorskip("matplotlib")
    from mixedkv_bench.output.plots_frontier import Point, points

    rows = [*all_quality(3.0), *all_quality(1.0), *all_quality(9.0)]
    found = points(rows, lambda row: getattr(row, "kld_mean", None))
    assert found["q4_0"] == Point(4.5, *(pytest.approx(times * 1e-3) for times in (1, 3, 9)))
    assert set(found) == {"f16 flash", *(kv for kv in BITS if kv != "f16")}


def test_the_line_passes_what_is_worse_at_as_many_bits() -> None:
    pytest.importorskip("matplotlib")
    from mixedkv_bench.output.plots_frontier import Point, least

    def point(bits: float, middle: float) -> Point:
        return Point(bits, middle, middle, middle)

    best = [point(4, 1e-3), point(5, 1e-4), point(16, 1e-6)]
    assert least([best[2], point(6, 1e-4), best[1], point(5, 2e-4), best[0], point(4.5, 1e-2)]) == best
    assert least([]) == []


def test_the_mode_is_one_that_all_have() -> None:
    both = [*all_quality(), *all_quality(mode="token")]
    assert "token by token" in draw({"plain": both})._suptitle.get_text()
    assert "in large batches" in draw({"plain": both, "outliers": all_quality()})._suptitle.get_text()
    assert draw({"plain": all_quality(mode="token"), "outliers": all_quality()}) is None
    assert draw({"plain": [recall("q4_0", 3)]}) is None


def test_the_reference_is_not_a_point() -> None:
    figure = draw({"a model": [*all_quality(), quality("f16", times=0.0, control=True)]})
    assert set(settings(figure)) == {"f16 flash", *(kv for kv in BITS if kv != "f16")}


def document(rows: list[Row]) -> Document:
    machine = {"cpu": "x", "cores": 1, "memory_bytes": 1, "system": "x", "load_average": [0.0, 0.0, 0.0]}
    named = ("mixedkv", "llama_commit", "isa", "llama_cpp_python", "python", "numpy")
    sizes = ("n_head", "n_head_kv", "head_size_k", "head_size_v")
    model = {"file": "x.gguf", "name": "a model", "architecture": "llama", "bytes": 1, "n_layer": 1}
    return Document.model_validate(
        {
            "schema": "mixedkv.bench/1",
            "created": "",
            "command": "",
            "interrupted": False,
            "machine": machine,
            "versions": dict.fromkeys(named, "x"),
            "model": {**model, **{key: [1] for key in sizes}, "n_ctx_train": 1},
            "rows": [row.as_json() for row in rows],
        }
    )


def test_saved_results_are_drawn_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    from mixedkv_bench.output import plots

    files = {"plain": [all_quality()], "outliers": [all_quality(2), all_quality(3)]}
    given = []
    for label, results in files.items():
        for i, rows in enumerate(results):
            path = tmp_path / f"{label}{i}.json"
            path.write_text(document(rows).model_dump_json(by_alias=True, exclude_unset=True))
            given.append(f"{label}={path}")
    monkeypatch.setattr(sys, "argv", ["plots", *given, str(tmp_path)])
    plots.main()
    assert capsys.readouterr().out == f"wrote {tmp_path / 'frontier.png'}\n"
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")


def test_results_that_cannot_be_drawn_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from mixedkv_bench.output import plots

    path = tmp_path / "a.json"
    path.write_text(document([recall("q4_0", 3)]).model_dump_json(by_alias=True, exclude_unset=True))
    for args, problem in (
        ([f"plain={path}", str(tmp_path)], "nothing to draw"),
        ([str(tmp_path / "none.json"), str(tmp_path)], "none.json"),
        ([str(path)], "usage"),
    ):
        monkeypatch.setattr(sys, "argv", ["plots", *args])
        with pytest.raises(SystemExit, match=problem):
            plots.main()
