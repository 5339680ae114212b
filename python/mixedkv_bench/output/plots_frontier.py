"""Plots divergence and facts found against bits, of one model or of several beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator

from mixedkv_bench.harness.row import CacheRow, Row
from mixedkv_bench.output.plots_kept import Styles
from mixedkv_bench.quality import QualityRow
from mixedkv_bench.recall import RecallRow

Models = Mapping[str, Sequence[Row]]  # rows by what their column is called; of several models, all of them
_LEAST = 1e-9  # nats; a logarithm has no zero
_BITS = (2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 10, 12, 16, 32)
# steps: the least that so many bits give, of mixed caches and of others
_FAMILIES: dict[bool, dict[str, Any]] = {
    True: {"color": "#D55E00", "linestyle": "-", "label": "least of mixed caches"},
    False: {"color": "#767676", "linestyle": "--", "label": "least of llama.cpp's"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Panel:
    """A vertical axis: what it shows of a row, None where the row has nothing for it."""

    name: str
    value: Callable[[Row], float | None]
    is_divergence: bool = True


@dataclass(frozen=True, slots=True)
class Point:
    """A setting: its bits per element, and the middle of its values with the least and the most."""

    bits: float
    low: float
    middle: float
    high: float


def figures(models: Models, styles: Styles, name: str) -> Iterator[tuple[str, Figure]]:
    """Name and picture, if there are rows of `mixedkv bench quality`; `name` is the model's.

    A column for each of `models`, or a row of panels if there is one. Rows of a mode that not all of them
    have are left out, "token" before "batch"; facts found are shown if anyone has them.
    """
    quality = {label: _quality(rows) for label, rows in models.items()}
    modes = [mode for mode in ("token", "batch") if all(_has(rows, mode) for rows in quality.values())]
    if not models or not modes:
        return
    panels = [_divergence("mean", modes[0]), _divergence("median", modes[0])]
    if any(isinstance(row, RecallRow) and not row.control for rows in models.values() for row in rows):
        panels.append(_Panel(name="facts found, %", value=_found, is_divergence=False))
    contexts = sorted({row.n_ctx for rows in quality.values() for row in rows})
    title = (
        f"{name}, against an F32 cache, context of {' or '.join(f'{n:,}' for n in contexts)} tokens, "
        + {"token": "token by token", "batch": "in large batches"}[modes[0]]
    )
    yield "frontier", _grid(models, panels, styles, title)


def _quality(rows: Sequence[Row]) -> list[QualityRow]:
    return [row for row in rows if isinstance(row, QualityRow) and row.kld_mean and not row.control]


def _has(rows: Sequence[QualityRow], mode: str) -> bool:
    return any(row.mode == mode for row in rows)


def _divergence(which: str, mode: str) -> _Panel:
    def value(row: Row) -> float | None:
        if not isinstance(row, QualityRow) or row.mode != mode or row.control:
            return None
        found: float | None = getattr(row, f"kld_{which}")
        return None if found is None else max(found, _LEAST)

    return _Panel(name=f"{which} KL divergence, nats", value=value)


def _found(row: Row) -> float | None:
    if not isinstance(row, RecallRow) or row.control or not row.recall:
        return None
    return 100 * sum(part.correct for part in row.recall) / sum(part.n for part in row.recall)


def points(rows: Sequence[Row], value: Callable[[Row], float | None]) -> dict[str, Point]:
    """Return what `value` finds in the rows of each setting, by the setting's name."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        shown = value(row)
        if shown is not None and isinstance(row, CacheRow) and row.bits_per_element:
            found.setdefault(row.name, []).append((row.bits_per_element, shown))
    return {
        name: Point(
            bits=float(np.median([bits for bits, _ in pairs])),
            low=min(shown for _, shown in pairs),
            middle=float(np.median([shown for _, shown in pairs])),
            high=max(shown for _, shown in pairs),
        )
        for name, pairs in found.items()
    }


def least(of: Sequence[Point]) -> list[Point]:
    """Return the points that no other one beats in both bits and divergence, from few bits to many."""
    chosen: list[Point] = []
    for point in sorted(of, key=lambda each: (each.bits, each.middle)):
        if not chosen or point.middle < chosen[-1].middle:
            chosen.append(point)
    return chosen


def _grid(models: Models, panels: Sequence[_Panel], styles: Styles, title: str) -> Figure:
    """Make a grid of panels: side by side for one model, a column for each of several."""
    one = len(models) == 1
    n_rows, n_columns = (1, len(panels)) if one else (len(panels), len(models))
    heights = [1.0 if one or panel.is_divergence else 0.5 for panel in panels[:n_rows]]
    figure = Figure(figsize=(1.5 + 3.4 * n_columns, 1.8 + 2.9 * sum(heights)), layout="constrained")
    axes = figure.subplots(
        n_rows, n_columns, squeeze=False, sharex=True, sharey=False if one else "row", height_ratios=heights
    )
    for i, (label, rows) in enumerate(models.items()):
        for j, panel in enumerate(panels):
            axis = axes[0][j] if one else axes[j][i]
            _draw(axis, rows, panel, styles)
            if one or i == 0:
                axis.set_ylabel(panel.name)
            if one or j == len(panels) - 1:
                axis.set_xlabel("allocated bits per element")
            if not one and j == 0:
                axis.set_title(label)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    known = {
        label: handle
        for axis in axes.flat
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    names = [name for name in (*styles, *(family["label"] for family in _FAMILIES.values())) if name in known]
    handles = [known[name] for name in names]
    figure.legend(handles, names, loc="outside lower left", fontsize=9, ncols=max(2, n_columns))
    return figure


def _draw(axis: Axes, rows: Sequence[Row], panel: _Panel, styles: Styles) -> None:
    found = points(rows, panel.value)
    for is_mixed, line in _FAMILIES.items():
        family = [point for name, point in found.items() if name.startswith("mixed") == is_mixed]
        if panel.is_divergence and len(front := least(family)) > 1:
            x, y = [point.bits for point in front], [point.middle for point in front]
            axis.plot(x, y, linewidth=1, alpha=0.6, drawstyle="steps-post", **line)
    for name, style in styles.items():
        if point := found.get(name):
            reach = [[point.middle - point.low], [point.high - point.middle]]
            own: Any = {**style, "linestyle": "none", "markersize": 8, "elinewidth": 1.2}
            axis.errorbar(point.bits, point.middle, yerr=reach, label=name, **own)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(FixedLocator(_BITS))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if panel.is_divergence:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(numticks=12))
        axis.yaxis.set_minor_formatter(NullFormatter())
    else:
        axis.set_ylim(-4, 104)
