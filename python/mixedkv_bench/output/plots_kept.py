"""Pictures of kept KV and of the server, for `plots`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from mixedkv_bench.harness.row import Row
from mixedkv_bench.serve import ServeRow
from mixedkv_bench.store import ChatRow, StoreRow

Styles = dict[str, dict[str, Any]]  # what `Axes.plot` takes, by setting
MakeFigure = Callable[..., tuple[Figure, list[Axes]]]


def figures(
    rows: Sequence[Row], styles: Styles, model: str, make: MakeFigure
) -> Iterator[tuple[str, Figure]]:
    """Name and picture of everything there are rows for."""
    store = [row for row in rows if isinstance(row, StoreRow)]
    if store:
        yield "store", _store(store, styles, model, make)
    chat = [row for row in rows if isinstance(row, ChatRow)]
    if any(len(row.turns) > 1 for row in chat):
        yield "chat", _chat(chat, styles, model, make)
    serve = [row for row in rows if isinstance(row, ServeRow)]
    if serve:
        yield "serve", _serve(serve, styles, model, make)


def _store(rows: Sequence[StoreRow], styles: Styles, model: str, make: MakeFigure) -> Figure:
    figure, (axis,) = make(8.5, 4.4)
    tiers = list(dict.fromkeys(row.tier for row in rows))
    for name, style in styles.items():
        chosen = [row for row in rows if row.name == name]
        if chosen:
            places = [tiers.index(row.tier) for row in chosen]
            axis.plot(places, _ms(row.ttft for row in chosen), label=name, **{**style, "linestyle": "none"})
    axis.set_xticks(range(len(tiers)), [tier.replace("_", "\n") for tier in tiers])
    _milliseconds(axis)
    axis.set_title(f"{model}, a prompt of {rows[0].n_prompt:,} tokens: milliseconds to the first token")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    return figure


def _chat(rows: Sequence[ChatRow], styles: Styles, model: str, make: MakeFigure) -> Figure:
    """Draw a chat's turns: filled marks had their history kept, empty ones evaluated it anew."""
    figure, (axis,) = make(8.5, 4.4)
    for row in rows:
        style = styles[row.name]
        turns = [turn.turn for turn in row.turns]
        axis.plot(turns, _ms(turn.ttft for turn in row.turns), label=row.name, **style)
        empty = {**style, "markerfacecolor": "white"}
        axis.plot(turns, _ms(turn.ttft_cold for turn in row.turns), **empty)
    _milliseconds(axis)
    axis.set_xlabel("turn")
    axis.set_title(f"{model}: milliseconds to the first token; empty marks: history evaluated anew")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    return figure


def _serve(rows: Sequence[ServeRow], styles: Styles, model: str, make: MakeFigure) -> Figure:
    figure, (rate, first) = make(10.5, 4.4, 2)
    most = max(row.clients for row in rows)
    for name, style in styles.items():
        chosen = [row for row in rows if row.name == name and row.tps is not None]
        if chosen:
            rate.plot([row.clients for row in chosen], [row.tps or 0 for row in chosen], label=name, **style)
        for row in chosen:
            if row.clients == most:
                parts = row.by_turn or []
                first.plot([part.turn for part in parts], _ms(part.ttft for part in parts), **style)
    rate.set_xscale("log", base=2)
    rate.set_xticks(sorted({row.clients for row in rows}))
    rate.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    rate.set_ylim(bottom=0)
    rate.set_xlabel("clients at a time")
    rate.set_title("Tokens/s of all")
    _milliseconds(first)
    first.set_xlabel("turn")
    first.set_title(f"Milliseconds to the first token, {most} clients")
    threads = rows[0].threads
    title = f"{model}, on {threads} CPU {'threads' if threads > 1 else 'thread'} for each server"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.legend(*rate.get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    return figure


def _ms(seconds: Iterable[float | None]) -> list[float]:
    return [1e3 * value for value in seconds if value is not None]


def _milliseconds(axis: Axes) -> None:
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
