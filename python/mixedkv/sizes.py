"""Sizes as people write them."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(?P<number>\d+\.?\d*|\.\d+) *((?P<unit>[KMGT])I?)?B?", re.ASCII)


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
