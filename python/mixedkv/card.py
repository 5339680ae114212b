"""Render an object as the card that notebooks show: a table with a title, and bars. No scripts, and every
text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_BOX = "display:inline-block;border:1px solid #8886;border-radius:6px;padding:8px 12px;font-size:13px"
_CELL = "text-align:left;padding:1px 12px 1px 0;border:none;background:none;vertical-align:top"
_BAR = "display:flex;width:320px;height:12px;border-radius:3px;overflow:hidden;background:#8883"


def card(title: str, rows: Iterable[tuple[str, object]], picture: str = "") -> str:
    """Return HTML with a line for each label and value, and below it a picture, which is HTML."""
    lines = "".join(
        f'<tr style="background:none"><th style="{_CELL};font-weight:normal;opacity:.7">{escape(label)}</th>'
        f'<td style="{_CELL}">{escape(str(value))}</td></tr>'
        for label, value in rows
    )
    table = f'<table style="margin:4px 0;color:inherit;font-size:inherit">{lines}</table>'
    return f'<div style="{_BOX}"><b>{escape(title)}</b>{table}{picture}</div>'


def bar(parts: Iterable[tuple[str, float, str]], total: float, text: str) -> str:
    """Return a bar of parts, each of a name, a size and a colour, out of `total`, with a text behind it."""
    pieces = "".join(
        f'<div title="{escape(name)}: {size:g}" style="width:{100 * size / max(total, 1):.3f}%;'
        f'background:{escape(colour)}"></div>'
        for name, size, colour in parts
        if size > 0
    )
    line = f'<div style="{_BAR}">{pieces}</div><span>{escape(text)}</span>'
    return f'<div style="display:flex;gap:8px;align-items:center;margin:2px 0">{line}</div>'


def rows_of(text: str) -> list[tuple[str, str]]:
    """Return the labels and values of lines that are a word, spaces, and the rest."""
    found = (line.partition(" ") for line in text.splitlines())
    return [(label, value.strip()) for label, _, value in found]
