"""Pictures of kept KV and of the server, for `plots`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from mixedkv.bench.output.cells import Row, setting_name

MakeFigure = Callable[..., tuple[Figure, list[Axes]]]


def figures(
    rows: Sequence[Row], styles: dict[str, Row], model: str, make: MakeFigure
) -> Iterator[tuple[str, Figure]]:
    """Name and picture of everything there are rows for."""
    store = [row for row in rows if row["test"] == "store"]
    if store:
        yield "store", _store(store, styles, model, make)
    chat = [row for row in rows if row["test"] == "chat"]
    if any(len(row["turns"]) > 1 for row in chat):
        yield "chat", _chat(chat, styles, model, make)
    serve = [row for row in rows if row["test"] == "serve"]
    if serve:
        yield "serve", _serve(serve, styles, model, make)


def _store(rows: Sequence[Row], styles: dict[str, Row], model: str, make: MakeFigure) -> Figure:
    figure, (axis,) = make(8.5, 4.4)
    tiers = list(dict.fromkeys(row["tier"] for row in rows))
    for name, style in styles.items():
        points = [(tiers.index(row["tier"]), 1e3 * row["ttft"]) for row in rows if setting_name(row) == name]
        if points:
            axis.plot(*zip(*points, strict=True), label=name, **{**style, "linestyle": "none"})
    axis.set_xticks(range(len(tiers)), [tier.replace("_", "\n") for tier in tiers])
    _milliseconds(axis)
    axis.set_title(f"{model}, a prompt of {rows[0]['n_prompt']:,} tokens: milliseconds to the first token")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    return figure


def _chat(rows: Sequence[Row], styles: dict[str, Row], model: str, make: MakeFigure) -> Figure:
    """Filled marks are turns whose history was kept, empty ones evaluated it anew."""
    figure, (axis,) = make(8.5, 4.4)
    for row in rows:
        style = styles[setting_name(row)]
        turns = [turn["turn"] for turn in row["turns"]]
        for key, label, more in (
            ("ttft", setting_name(row), {}),
            ("ttft_cold", None, {"markerfacecolor": "white"}),
        ):
            axis.plot(turns, [1e3 * turn[key] for turn in row["turns"]], label=label, **{**style, **more})
    _milliseconds(axis)
    axis.set_xlabel("turn")
    axis.set_title(f"{model}: milliseconds to the first token; empty marks: history evaluated anew")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    return figure


def _serve(rows: Sequence[Row], styles: dict[str, Row], model: str, make: MakeFigure) -> Figure:
    figure, (rate, first) = make(10.5, 4.4, 2)
    most = max(row["clients"] for row in rows)
    for name, style in styles.items():
        of_name = [row for row in rows if setting_name(row) == name]
        if of_name:
            points = [(row["clients"], row["tps"]) for row in of_name]
            rate.plot(*zip(*points, strict=True), label=name, **style)
        for row in of_name:
            if row["clients"] == most:
                turns = [(part["turn"], 1e3 * part["ttft"]) for part in row["by_turn"]]
                first.plot(*zip(*turns, strict=True), **style)
    rate.set_xscale("log", base=2)
    rate.set_xticks(sorted({row["clients"] for row in rows}))
    rate.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    rate.set_ylim(bottom=0)
    rate.set_xlabel("clients at a time")
    rate.set_title("Tokens/s of all")
    _milliseconds(first)
    first.set_xlabel("turn")
    first.set_title(f"Milliseconds to the first token, {most} clients")
    threads = rows[0]["threads"]
    title = f"{model}, on {threads} CPU {'threads' if threads > 1 else 'thread'} for each server"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.legend(*rate.get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    return figure


def _milliseconds(axis: Axes) -> None:
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
