"""Pictures of a run's rows, by matplotlib, which is imported when one is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = (".png", ".svg", ".pdf")
_WIDE, _HIGH = 11.0, 4.8  # inches
_LEAST = 1e-9  # nats; a logarithmic axis has no zero


def check(path: Path) -> None:
    """Check that a picture can be made, before anything is measured.

    Raises:
        ValueError: the file has no kind that is drawn, or matplotlib is not installed.
    """
    if path.suffix.lower() not in KINDS:
        raise ValueError(f"--plot {path}: give a file that ends in {', '.join(KINDS)}")
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install 'mixedkv[plot]'")


def save(path: Path, title: str, draw: Callable[[Figure, Sequence[Any]], None], rows: Sequence[Any]) -> bool:
    """Write the picture of some rows, and return whether there was anything to draw."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDE, _HIGH), layout="constrained")
    draw(figure, [row for row in rows if row.error is None])
    if not any(axes.has_data() for axes in figure.axes):
        return False
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)
    return True


def quick(figure: Figure, rows: Sequence[Any]) -> None:
    """Draw divergence against bits, and how fast each cache generates."""
    left, right = figure.subplots(1, 2)
    _divergence(left, rows)
    timed = [row for row in rows if row.tg_tps is not None]
    right.barh([row.name for row in timed], [row.tg_tps for row in timed])
    right.invert_yaxis()
    depth = timed[0].depth if timed else 0
    right.set(xlabel=f"tokens generated per second, {depth:,} tokens deep", title="Speed")


def quality(figure: Figure, rows: Sequence[Any]) -> None:
    """Draw divergence against bits, for each way of evaluating."""
    shown = [row for row in rows if not row.control]
    modes = list(dict.fromkeys(row.mode for row in shown)) or [""]
    for axes, mode in zip(figure.subplots(1, len(modes), squeeze=False)[0], modes, strict=True):
        _divergence(axes, [row for row in shown if row.mode == mode])
        axes.set_title({"batch": "In large batches", "token": "Token by token"}.get(mode, mode))


def speed(figure: Figure, rows: Sequence[Any]) -> None:
    """Draw rates against the depth of the cache."""
    names = list(dict.fromkeys(row.name for row in rows))
    parts = (("pp_tps", "Prompts"), ("tg_tps", "Generation"))
    for axes, (field, title) in zip(figure.subplots(1, 2), parts, strict=True):
        for name in names:
            points = [(row.depth, getattr(row, field)) for row in rows if row.name == name]
            known = sorted(point for point in points if point[1] is not None)
            if known:
                axes.plot(*zip(*known, strict=True), marker="o", label=name)
        axes.set(xlabel="tokens in the cache", ylabel="tokens per second", title=title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    if names:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)


def sensitivity(figure: Figure, rows: Sequence[Any]) -> None:
    """Draw what K and V of each layer add to the divergence."""
    axes = figure.subplots()
    for part, shift in (("k", -0.2), ("v", 0.2)):
        of = [row for row in rows if row.part == part and row.kld_share is not None]
        if of:
            axes.bar(
                [row.layer + shift for row in of], [row.kld_share for row in of], 0.4, label=part.upper()
            )
    axes.set(xlabel="layer", ylabel="added divergence, nats", title="Cold rows of the coarsest type")
    if axes.has_data():
        axes.legend()


def _divergence(axes: Axes, rows: Sequence[Any]) -> None:
    known = [row for row in rows if row.kld_mean is not None and row.bits_per_element]
    for row in known:
        axes.plot(row.bits_per_element, max(row.kld_mean, _LEAST), "o")
        at = (row.bits_per_element, max(row.kld_mean, _LEAST))
        axes.annotate(row.name, at, xytext=(5, 5), textcoords="offset points", fontsize="small")
    if known:
        axes.set_yscale("log")
    axes.margins(x=0.2, y=0.1)
    axes.set(xlabel="bits per element of K and V", ylabel="mean KL divergence, nats", title="Quality")
    axes.grid(alpha=0.3)
