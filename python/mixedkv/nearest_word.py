"""Names the known word that a misspelt one is likely to mean."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean ...?)` where a known word is like this one, else ""."""
    alike = {each: _likeness(word.strip("-"), each.strip("-")) for each in known}
    nearest = max(alike, key=alike.__getitem__)
    return f" (did you mean {nearest}?)" if alike[nearest] >= 0.75 else ""


def _likeness(one: str, other: str) -> float:
    short, long = sorted((one, other), key=len)
    if len(short) > 2 and long.startswith(short):
        return 0.9
    return difflib.SequenceMatcher(None, one, other).ratio()
