"""Checks a setting's fields against the options of a cache, which stand in cpp/spec/spec.cpp."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from mixedkv import _core

_KINDS = {int: "a whole number", str: "text", bool: "True or False"}


def options_of(setting: Any) -> dict[str, Any]:
    """Return the fields of a setting, a dataclass, that are options of a cache."""
    return {
        each.name: getattr(setting, each.name)
        for each in fields(setting)
        if each.name != "enable_quantization"
    }


def normalise(setting: Any, *, mixed: bool) -> None:
    """Bring the fields of a new setting, a dataclass, to their normal form.

    Raises:
        ValueError: a value is out of range or unknown; the message names the field.
        TypeError: a value has another type than the field.
    """
    for each in fields(setting):
        value, kind = getattr(setting, each.name), type(each.default)
        takes = int | float | str if each.name == "budget" else kind
        if not isinstance(value, takes) or (isinstance(value, bool) and kind is not bool):
            wanted = "bytes, or text such as '2GiB'" if each.name == "budget" else _KINDS[kind]
            raise TypeError(f"{each.name}={value!r}: use {wanted}")
    for name, value in _core.check_kv(mixed, options_of(setting)).items():
        object.__setattr__(setting, name, value)


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
