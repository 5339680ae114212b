"""Sizes as people write them."""

from __future__ import annotations


def parse_size(text: str) -> int:
    """Bytes of "2GiB", "500M" or "4096"; units are powers of 1024.

    Raises:
        ValueError: it is no size.
    """
    digits = text.strip().upper().removesuffix("B").removesuffix("I")
    factor = 1024 ** ("KMGT".find(digits[-1:]) + 1) if digits[-1:] in tuple("KMGT") else 1
    try:
        value = float(digits.rstrip("KMGT")) * factor
    except ValueError:
        value = 0.0
    if not 1 <= value < 2**60:
        raise ValueError(f"{text!r} is not a size: use e.g. 2GiB or 500MiB")
    return int(value)
