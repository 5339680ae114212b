"""Draw what `mixedkv bench --json` wrote: speed against depth, or divergence against bits. Needs matplotlib.

    python tests/measure/plots.py speed speed.json docs/plots/speed.png
    python tests/measure/plots.py frontier prose=prose.json code=code.json docs/plots/frontier-real.png

Divergence has a column for each name; several files with one name show their middle and how far they reach.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mixedkv_bench.output import read_result
from mixedkv_bench.quality import QualityRow
from mixedkv_bench.speed import SpeedRow

# Okabe and Ito (2008): told apart with any colour vision. Llama.cpp's caches are grey and black.
_MIXED = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#B8A800")
_UNIFORM = ("#000000", "#767676", "#3F3F3F", "#9A9A9A", "#5A5A5A", "#B0B0B0")
_FRONT = {True: ("#D55E00", "-"), False: ("#767676", "--")}


def styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The colour and marker of each cache."""
    found: dict[str, dict[str, Any]] = {}
    for is_mixed, colors in ((True, _MIXED), (False, _UNIFORM)):
        own = [name for name in dict.fromkeys(names) if name.startswith("mixed") == is_mixed]
        for i, name in enumerate(own):
            line = "-" if is_mixed else "--"
            marker = "osD^vP*X"[i % 8]
            found[name] = {"color": colors[i % len(colors)], "marker": marker, "linestyle": line}
    return found


def speed(path: Path) -> Figure:
    """Tokens per second against depth."""
    head, all_rows = read_result(path)
    rows = [row for row in all_rows if isinstance(row, SpeedRow) and row.tg_tps]
    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, key, title in zip(axes, ("tg_tps", "pp_tps"), ("Generation", "Prompt"), strict=True):
        for name, style in styles([row.name for row in rows]).items():
            own = [row for row in rows if row.name == name]
            axis.plot([row.depth for row in own], [getattr(row, key) for row in own], label=name, **style)
        axis.set(yscale="log", xlabel="tokens in the cache", title=f"{title}, tokens/s")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k" if value else "0")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    figure.suptitle(f"{head.model}, on {rows[0].threads} CPU threads", x=0.01, ha="left")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    return figure


def frontier(given: Sequence[str]) -> Figure:
    """Divergence against bits, with a column for each name: mean above median."""
    columns: dict[str, list[QualityRow]] = {}
    for each in given:
        label, _, file = each.rpartition("=")
        head, rows = read_result(Path(file))
        own = [row for row in rows if isinstance(row, QualityRow) and row.kld_mean and not row.control]
        columns.setdefault(label or head.model, []).extend(own)
    figure = Figure(figsize=(1.5 + 3.4 * len(columns), 7.6), layout="constrained")
    axes = figure.subplots(2, len(columns), squeeze=False, sharex=True, sharey="row")
    known = styles([row.name for rows in columns.values() for row in rows])
    for column, (label, rows) in zip(axes.T, columns.items(), strict=True):
        for axis, key in zip(column, ("kld_mean", "kld_median"), strict=True):
            _points(axis, rows, key, known)
        column[0].set_title(label)
        column[1].set_xlabel("allocated bits per element")
    for axis, name in zip(axes[:, 0], ("mean", "median"), strict=True):
        axis.set_ylabel(f"{name} KL divergence, nats")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower left", ncols=3, fontsize=9)
    return figure


def _points(axis: Axes, rows: Sequence[QualityRow], key: str, known: dict[str, dict[str, Any]]) -> None:
    middles: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for name, style in known.items():
        own = [row for row in rows if row.name == name]
        if not own:
            continue
        values = [getattr(row, key) for row in own]
        bits, middle = float(np.median([row.bits_per_element for row in own])), float(np.median(values))
        axis.plot([bits, bits], [min(values), max(values)], color=style["color"], linewidth=1)
        axis.plot([bits], [middle], label=name, **{**style, "linestyle": "none"})
        middles[name.startswith("mixed")].append((bits, middle))
    for is_mixed, points in middles.items():
        color, line = _FRONT[is_mixed]
        points.sort()
        least = np.minimum.accumulate([value for _, value in points])
        axis.step([bits for bits, _ in points], least, where="post", color=color, linestyle=line, alpha=0.6)
    axis.set(xscale="log", yscale="log")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def main() -> None:
    if len(sys.argv) < 4 or sys.argv[1] not in ("speed", "frontier"):
        raise SystemExit(
            "usage: plots.py speed RESULT.json PICTURE | plots.py frontier NAME=RESULT.json... PICTURE"
        )
    mpl.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True})
    figure = speed(Path(sys.argv[2])) if sys.argv[1] == "speed" else frontier(sys.argv[2:-1])
    figure.savefig(sys.argv[-1], dpi=160)
    print(f"wrote {sys.argv[-1]}")


if __name__ == "__main__":
    main()
