"""Parses how long a model stays in memory after a request, in the notation of Ollama's clients."""

from __future__ import annotations

import math
import re

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_PART = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ms|min|[smhd])", re.ASCII)
_NUMBER = re.compile(r"-?\d{1,12}(\.\d{1,9})?", re.ASCII)
_HELP = 'use seconds, a text such as "10m" or "1h30m", 0, or -1 for ever'


def parse_keep_alive(value: object) -> float:
    """Return the seconds of a number or of a text such as "10m" or "1h30m"; below zero is infinity.

    Raises:
        ValueError: the value is neither.
    """
    if isinstance(value, str):
        return _read(value.strip())
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(f"{str(value)[:50]!r} is not a time: {_HELP}")
    return math.inf if value < 0 else float(value)


def _read(text: str) -> float:
    if _NUMBER.fullmatch(text):
        return parse_keep_alive(float(text))
    parts = text.removeprefix("-")
    seconds = [float(number) * _UNITS[unit] for number, unit in _PART.findall(parts)]
    if not parts or _PART.sub("", parts):
        raise ValueError(f"{text[:50]!r} is not a time: {_HELP}")
    return math.inf if text.startswith("-") and sum(seconds) > 0 else sum(seconds)
