"""Sizes and durations as people write them."""

from __future__ import annotations

import math
import re

from mixedkv import _core

GB, MB = 10**9, 10**6
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_PART = re.compile(r"(\d{1,12}\.?\d{0,9}|\.\d{1,9}) *(ms|min|[smhdw])", re.ASCII)


def parse_size(text: str, unit: int = 1, least: int = 1) -> int:
    """Convert "2GiB", "500M", "10GB" or "4096" to bytes. GB and its like are powers of 1000, GiB and G of
    1024.

    Args:
        unit: bytes that a number without a unit counts.
        least: bytes that are enough: 0 where a size of 0 means none.

    Raises:
        ValueError: it is no size.
    """
    n_bytes = _core.parse_size(text.strip(), unit)
    if n_bytes < least:
        raise ValueError(f"{text!r} is not a size: use e.g. 2GiB or 500MiB")
    return n_bytes


def size_of(field: str, value: float | str, unit: int = 1) -> int:
    """Return the bytes of a size as Python is given it: a number of `unit` bytes, or a text such as "2GiB".

    Raises:
        ValueError: it is no size; the message names the field.
    """
    if isinstance(value, str):
        try:
            return parse_size(value, unit, least=0)
        except ValueError as error:
            raise ValueError(f"{field}={error}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{field}={value!r}: use a number, or e.g. '2GiB'")
    if not 0 <= value < 2**60 / unit:
        raise ValueError(f"{field}={value}: use a number from 0 to {2**60 // unit}, or e.g. '2GiB'")
    return int(value * unit)


def format_bytes(n: int, *, enough: bool = False) -> str:
    """Format a size to read: "312 B", "1.4 MiB".

    Args:
        enough: round up, so that whoever types what is said has these bytes.
    """
    size = float(n)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    if unit == "B":
        return f"{n} B"
    return f"{math.ceil(size * 10) / 10 if enough else size:.1f} {unit}"


def parse_duration(text: str) -> float:
    """Convert "30d", "1h30m" or "90" to seconds; units are ms, s, min or m, h, d (24 hours) and w.

    Raises:
        ValueError: it is no duration.
    """
    parts = text.strip().lower()
    parts += "" if parts[-1:].isalpha() else "s"
    value = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(parts))
    if _PART.sub("", parts) or not 0 < value < 2**40:
        raise ValueError(f"{text!r} is not a duration: use e.g. 30d, 12h or 90min")
    return value
