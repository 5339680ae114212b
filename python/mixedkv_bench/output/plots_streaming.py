"""Picture of layers streamed, for `plots`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mixedkv_bench.harness.row import Row
from mixedkv_bench.streaming import StreamingRow

MakeFigure = Callable[..., tuple[Figure, list[Axes]]]
_STYLES: dict[str, Any] = {  # as in `plots`: grey and black is what others do
    "direct": {"color": "#D55E00", "marker": "o"},
    "prefetch": {"color": "#0072B2", "marker": "s"},
    "mmap": {"color": "#000000", "marker": "D", "linestyle": "--"},
}


def figures(rows: Sequence[Row], model: str, make: MakeFigure) -> Iterator[tuple[str, Figure]]:
    """Draw tokens per second against memory, of the first setting where there are several."""
    streamed = [row for row in rows if isinstance(row, StreamingRow) and row.pass_seconds]
    streamed = [row for row in streamed if row.kv == streamed[0].kv]
    if any(row.memory_bytes for row in streamed):
        yield "streaming", _by_memory(streamed, model, make)


def _by_memory(rows: Sequence[StreamingRow], model: str, make: MakeFigure) -> Figure:
    figure, (axis,) = make(7.0, 4.2)
    for mode, style in _STYLES.items():
        points = sorted(
            (row.memory_bytes / 2**30, 1 / row.pass_seconds)
            for row in rows
            if row.mode == mode and row.memory_bytes and row.pass_seconds
        )
        if points:
            axis.plot([x for x, _ in points], [y for _, y in points], label=mode, **style)
    for row in rows:
        if row.mode == "resident" and row.pass_seconds:
            axis.axhline(1 / row.pass_seconds, color="#9A9A9A", linestyle=":", label="all in memory")
    axis.set_ylim(bottom=0)
    axis.set_xticks(sorted({row.memory_bytes / 2**30 for row in rows if row.memory_bytes}))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_xlabel("memory of the process, GiB")
    axis.set_ylabel("tokens/s, one answer")
    axis.set_title(f"{model}, on {rows[0].threads} CPU {'threads' if rows[0].threads > 1 else 'thread'}")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    return figure
