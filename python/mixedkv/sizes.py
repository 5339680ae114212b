"""Sizes and durations as people write them."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(?P<number>\d+\.?\d*|\.\d+) *((?P<unit>[KMGT])I?)?B?", re.ASCII)

_DURATION = re.compile(r"(?P<number>\d+\.?\d*|\.\d+) *(?P<unit>s|min|h|d|w)?", re.ASCII)
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def parse_size(text: str) -> int:
    """Bytes of "2GiB", "500M" or "4096"; units are powers of 1024.

    Raises:
        ValueError: it is no size.
    """
    found = _SIZE.fullmatch(text.strip().upper())
    value = float(found["number"]) * 1024 ** " KMGT".find(found["unit"] or " ") if found else 0.0
    if not 1 <= value < 2**60:
        raise ValueError(f"{text!r} is not a size: use e.g. 2GiB or 500MiB")
    return int(value)


def parse_duration(text: str) -> float:
    """Seconds of "30d", "12h", "2w" or "90"; units are s, min, h, d (24 hours) and w.

    Raises:
        ValueError: it is no duration.
    """
    found = _DURATION.fullmatch(text.strip().lower())
    value = float(found["number"]) * _SECONDS[found["unit"] or "s"] if found else 0.0
    if not 0 < value < 2**40:
        raise ValueError(f"{text!r} is not a duration: use e.g. 30d, 12h or 90min")
    return value
