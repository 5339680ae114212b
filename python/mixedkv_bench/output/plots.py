"""Pictures of a result. Needs matplotlib: pip install 'mixedkv[plot]'.

    python -m mixedkv_bench.output.plots result.json FOLDER

draws them again from a saved result. Divergence against bits is drawn of several results beside each other:

    python -m mixedkv_bench.output.plots plain=a.json outliers=b1.json outliers=b2.json FOLDER

has a column for each name. A column of several results shows their middle and how far they reach; what
`quality` and `recall` say of one model can be two files.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from PIL import Image

from mixedkv_bench.catalog import Document
from mixedkv_bench.harness.row import Row
from mixedkv_bench.output import plots_frontier, plots_kept, plots_reuse, plots_streaming
from mixedkv_bench.output.plots_kept import Styles
from mixedkv_bench.quality import QualityRow
from mixedkv_bench.speed import SpeedRow

# Okabe and Ito (2008): told apart with any colour vision. Llama.cpp's caches are grey and black.
_MIXED = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#B8A800")
_UNIFORM = ("#000000", "#767676", "#3F3F3F", "#9A9A9A", "#5A5A5A", "#B0B0B0")
_MARKERS = "osD^vP*X"
_STYLE: Any = {  # rc_context wants each key as a literal type
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}
_DPI = 160


def draw(document: Document, folder: Path) -> list[Path]:
    """Draw what the rows have numbers for; the paths written."""
    rows = _measured(document)
    with mpl.rc_context(_STYLE):
        return list(_save(_figures(rows, _styles(rows), document.model.name), folder))


def draw_beside(documents: Mapping[str, Sequence[Document]], folder: Path) -> list[Path]:
    """Draw divergence against bits with a column for each name; the paths written."""
    models = {label: [row for each in of for row in _measured(each)] for label, of in documents.items()}
    rows = [row for each in models.values() for row in each]
    name = next(each.model.name for of in documents.values() for each in of)
    with mpl.rc_context(_STYLE):
        return list(_save(plots_frontier.figures(models, _styles(rows), name), folder))


def _measured(document: Document) -> list[Row]:
    return [row for row in document.rows if row.error is None]


def _save(figures: Iterator[tuple[str, Figure]], folder: Path) -> Iterator[Path]:
    for name, figure in figures:
        path, whole = folder / f"{name}.png", io.BytesIO()
        figure.savefig(whole, dpi=_DPI, bbox_inches="tight")
        with Image.open(whole) as image:  # a palette is enough, and a third of the bytes
            image.convert("RGB").quantize(256).save(path, optimize=True)
        yield path


def _figures(rows: Sequence[Row], styles: Styles, model: str) -> Iterator[tuple[str, Figure]]:
    quality = [row for row in rows if isinstance(row, QualityRow) and row.kld_mean and not row.control]
    mode = "token" if any(row.mode == "token" for row in quality) else "batch"
    quality = [row for row in quality if row.mode == mode]
    if quality:
        yield from plots_frontier.figures({model: rows}, styles, model)
        yield "error-by-position", _by_position(quality, styles, model)
    speed = [row for row in rows if isinstance(row, SpeedRow) and row.tg_tps is not None]
    if len({row.depth for row in speed}) > 1:
        yield "speed", _speed(speed, styles, model)
    yield from plots_kept.figures(rows, styles, model, _figure)
    yield from plots_reuse.figures(rows, model, _figure)
    yield from plots_streaming.figures(rows, model, _figure)


def _styles(rows: Sequence[Row]) -> Styles:
    """Return the colour and marker of each setting, the same in every picture."""
    names = {row.name: row.kv for row in rows if not getattr(row, "control", False)}
    styles: Styles = {}
    for is_mixed, colors in ((True, _MIXED), (False, _UNIFORM)):
        group = [name for name, kv in names.items() if kv.startswith("mixed") == is_mixed]
        for i, name in enumerate(group):
            line = "-" if is_mixed else "--"
            styles[name] = {
                "color": colors[i % len(colors)],
                "marker": _MARKERS[i % len(_MARKERS)],
                "linestyle": line,
            }
    return styles


def _figure(width: float, height: float, n: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, n, squeeze=False)[0])


def _by_position(rows: Sequence[QualityRow], styles: Styles, model: str) -> Figure:
    figure, (axis,) = _figure(8.5, 4.4)
    for row in rows:
        parts = [part for part in row.by_position or () if part.kld_mean > 0]
        style: Any = styles[row.name]
        axis.plot([part.to for part in parts], [part.kld_mean for part in parts], label=row.name, **style)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_yscale("log")
    axis.set_xlabel("position, up to")
    axis.set_ylabel("mean KL divergence, nats")
    axis.set_title(_quality_title(rows, model))
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    return figure


def _quality_title(rows: Sequence[QualityRow], model: str) -> str:
    how = "token by token" if rows[0].mode == "token" else "in large batches"
    return f"{model}, context of {rows[0].n_ctx:,} tokens, {how}"


def _speed(rows: Sequence[SpeedRow], styles: Styles, model: str) -> Figure:
    figure, axes = _figure(10.5, 4.4, 2)
    for axis, key, title in zip(axes, ("tg", "pp"), ("Generation", "Prompt"), strict=True):
        for name, style in styles.items():
            chosen = [row for row in rows if row.name == name]
            if chosen:
                rates = [getattr(row, f"{key}_tps") for row in chosen]
                axis.plot([row.depth for row in chosen], rates, label=name, **style)
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k" if value else "0")
        axis.set_xticks(sorted({row.depth for row in rows}))
        axis.set_xlabel("tokens in the cache")
        axis.set_title(f"{title}, tokens/s")
    figure.suptitle(
        f"{model}, on {rows[0].threads} CPU {'threads' if rows[0].threads > 1 else 'thread'}",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    return figure


def main() -> None:
    if len(sys.argv) < 3:
        raise SystemExit("usage: python -m mixedkv_bench.output.plots [NAME=]RESULT.json... FOLDER")
    documents: dict[str, list[Document]] = {}
    for given in sys.argv[1:-1]:
        label, _, file = given.rpartition("=")
        try:
            document = Document.model_validate_json(Path(file).read_bytes())
        except (OSError, ValueError) as error:
            raise SystemExit(f"{file} is not what mixedkv bench --json writes: {error}") from None
        documents.setdefault(label or document.model.name, []).append(document)
    folder = Path(sys.argv[-1])
    written = draw(document, folder) if len(sys.argv) == 3 else draw_beside(documents, folder)
    if not written:
        raise SystemExit("nothing to draw: give results of `bench quality`, all of one --mode")
    for path in written:
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
