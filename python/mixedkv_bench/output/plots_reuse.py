"""Pictures of passages reused elsewhere, for `plots`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from mixedkv_bench.harness.reuse_cases import CaseMaker
from mixedkv_bench.harness.row import Row
from mixedkv_bench.reuse import ReuseRow

MakeFigure = Callable[..., tuple[Figure, list[Axes]]]
_COLORS = {  # as in `plots`: grey and black is what others do
    "full": "#000000",
    "none": "#767676",
    "seam": "#009E73",
    "cacheblend": "#CC79A7",
    "query": "#D55E00",
    "kvboost": "#0072B2",
}
_LEAST = 1e-8  # nats; a logarithm has no zero


def figures(rows: Sequence[Row], model: str, make: MakeFigure) -> Iterator[tuple[str, Figure]]:
    """Name and picture of everything there are rows for; of the first setting where there are several."""
    reuse = [row for row in rows if isinstance(row, ReuseRow) and row.ttft_samples]
    reuse = [row for row in reuse if row.name == reuse[0].name]
    if reuse:
        yield "reuse", _cost_and_error(reuse, model, make)
    history = [row for row in reuse if row.workload == "system"]
    if any(row.n_cases > CaseMaker.TURNS for row in history):
        yield "reuse-ttft", _by_turn(history, model, make)


def _cost_and_error(rows: Sequence[ReuseRow], model: str, make: MakeFigure) -> Figure:
    """Plot what each method leaves of the time to the first token, and how far off the answer then is."""
    kinds = list(dict.fromkeys((row.workload, row.donor) for row in rows))
    figure, axes = make(11.5, 4.4, 2)
    cost, error = axes
    cost.set_title("First token, of cold")
    error.set_title("Mean KL divergence, nats (kvboost: of the first token)")
    for axis in axes:
        for method in [name for name in _COLORS if name != "full"]:
            chosen = {(row.workload, row.donor): row for row in rows if row.method == method}
            places = [i for i, kind in enumerate(kinds) if kind in chosen]
            of = [chosen[kinds[i]] for i in places]
            values = [row.vs_cold if axis is cost else row.kld_mean or row.kld_first for row in of]
            shown = [max(_LEAST, value or 0.0) for value in values]
            style: Any = {"color": _COLORS[method], "marker": "o", "linestyle": "none"}
            axis.plot(shown, places, label=method, **style)
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.invert_yaxis()
        axis.set_yticks(range(len(kinds)), [""] * len(kinds))
    cost.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    cost.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    cost.set_yticks(range(len(kinds)), [f"{workload}, {donor}" for workload, donor in kinds])
    return _titled(figure, cost, rows, model)


def _by_turn(rows: Sequence[ReuseRow], model: str, make: MakeFigure) -> Figure:
    """Return the share of a turn's cases that have their first token by then."""
    figure, axes = make(13, 3.8, CaseMaker.TURNS)
    for turn, axis in enumerate(axes):
        for row in rows:
            seconds = np.sort((row.ttft_samples or [])[turn :: CaseMaker.TURNS])
            if len(seconds):
                shares = np.arange(1, len(seconds) + 1) / len(seconds)
                axis.step(
                    np.r_[seconds[0], seconds],
                    np.r_[0, shares],
                    where="post",
                    color=_COLORS[row.method],
                    label=row.method,
                )
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_xlabel("seconds")
        axis.set_title(f"turn {turn + 1}")
        axis.set_ylim(0, 1.02)
        if turn:
            axis.set_yticklabels([])
    axes[0].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes[0].set_ylabel("cases with a first token")
    return _titled(figure, axes[0], rows, model)


def _titled(figure: Figure, axis: Axes, rows: Sequence[ReuseRow], model: str) -> Figure:
    title = f"{model}, {rows[0].name}, prompts of up to {max(row.n_prompt or 0 for row in rows):,} tokens"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    return figure
