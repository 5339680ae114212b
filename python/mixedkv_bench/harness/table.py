"""Tables of rows in a terminal, as plain text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from mixedkv_bench.harness.row import Row

NONE = "-"

_BETWEEN = "  "

Cells = list[list[str]]
R = TypeVar("R", bound=Row)


@dataclass(frozen=True, kw_only=True, slots=True)
class Table(Generic[R]):
    """Layout of the rows of one kind: a table for each value of `by`, which stands in its title."""

    row: type[R]
    title: str
    by: Callable[[R], object]
    cells: Callable[[Sequence[R]], Cells]

    def lines(self, rows: Sequence[Row]) -> Iterator[str]:
        """Yield the lines of the tables of this kind of row."""
        chosen = [row for row in rows if isinstance(row, self.row)]
        for value in dict.fromkeys(self.by(row) for row in chosen):
            group = [row for row in chosen if self.by(row) == value]
            yield ""
            yield self.title.format(value)
            yield from align(self.cells(group))
            yield from _errors(group)


def number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def spread(samples: Sequence[float] | None) -> str:
    """Return half the distance of the quartiles as a percentage, "" where there is one round only."""
    if samples is None or len(samples) < 2:
        return ""
    low, middle, high = np.percentile(samples, (25, 50, 75))
    return f"+-{(high - low) / middle / 2:.0%}"


def align(table: Cells) -> Iterator[str]:
    """Align the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        first, *others = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield ("  " + first + _BETWEEN + _BETWEEN.join(others)).rstrip()


def _errors(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row.error:
            yield f"  {row.name}: {' '.join(row.error.split())}"
