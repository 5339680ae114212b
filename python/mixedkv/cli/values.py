"""Values on the command line."""

from __future__ import annotations

from argparse import ArgumentTypeError

from mixedkv.limits import INT32_MAX


def positive(text: str) -> int:
    """A number of something, 1 or more."""
    if not (text.isascii() and text.isdigit() and 0 < int(text[:10]) <= INT32_MAX and len(text) <= 10):
        raise ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def temperature(text: str) -> float:
    """0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a temperature: use 0 or more")
    return value
