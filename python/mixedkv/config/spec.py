"""The text of a cache setting: "mixed:cold=q8_0,threshold=256"."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mixedkv.limits import INT32_MAX
from mixedkv.sizes import parse_size

HOT_BUDGETS = ("auto", "all")
_WORDS = {"hot_budget": HOT_BUDGETS, "rounding": ("auto",)}  # that stand beside whole numbers

KEYS = {
    "cold_k": "cold_type_k",
    "cold_v": "cold_type_v",
    "threshold": "quantization_threshold",
    "group": "group_size",
    "sinks": "sink_tokens",
    "attention": "attention",
    "draft": "n_draft",
    "equalize": "equalize",
    "hot_budget": "hot_budget",
    "layers": "layers",
    "budget": "budget",
    "bits": "bits",
    "shrink": "shrink",
    "rounding": "rounding",
    "v_skip": "v_skip",
    "sparse": "sparse",
}
_KNOWN_KEYS = "cold, " + ", ".join(KEYS)


def spec_of(name: str, options: dict[str, object]) -> str:
    """Return the text that reads back as these options."""
    items = (f"{key}={str(value).lower()}" for key, value in options.items())
    return name + (":" if options else "") + ",".join(items)


def parse_options(spec: str, text: str) -> dict[str, str]:
    """Return the values of a spec by their keys, as they stand in `text`.

    Raises:
        ValueError: it is no list of key=value, or a key is unknown or given twice.
    """
    options: dict[str, str] = {}
    for item in text.split(","):
        key, equals, value = item.partition("=")
        if not equals and ":" in item and next(reversed(options), "") == "layers":
            options["layers"] += f",{item}"  # which has commas of its own
            continue
        if not (key and equals and value):
            raise ValueError(f"kv={spec!r}: {item!r} is not key=value; known keys: {_KNOWN_KEYS}")
        if key != "cold" and key not in KEYS:
            raise ValueError(
                f"kv={spec!r}: unknown key {key!r}{did_you_mean(key, KEYS)}; known keys: {_KNOWN_KEYS}"
            )
        if key in options or (key in ("cold_k", "cold_v") and "cold" in options):
            raise ValueError(f"kv={spec!r} gives {key} twice")
        if key == "cold" and options.keys() & {"cold_k", "cold_v"}:
            raise ValueError(f"kv={spec!r}: cold stands for both cold_k and cold_v, which is given too")
        options[key] = value
    return options


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `, did you mean ...?` where a known word is like this one, else ""."""
    alike = {each: difflib.SequenceMatcher(None, word, each).ratio() for each in known}
    nearest = max(alike, key=alike.__getitem__)
    return f" (did you mean {nearest}?)" if alike[nearest] >= 0.6 else ""


def in_words_of_spec(options: Mapping[str, str], message: str) -> str:
    """Return a message about fields of a `MixedKVConfig` with the keys that a spec has for them."""
    keys = {field: key for key, field in KEYS.items()}
    if "cold" in options:
        message = message.replace("cold_type_k, cold_type_v", "cold_type_k")
        keys["cold_type_k"] = keys["cold_type_v"] = "cold"
    return re.sub(r"\b[a-z]+(?:_[a-z]+)+\b", lambda found: keys.get(found[0], found[0]), message)


def fields_of(spec: str, options: dict[str, str]) -> dict[str, Any]:
    """Return the fields of a `MixedKVConfig` by the keys of a spec.

    Raises:
        ValueError: a value is none of its kind.
    """
    cold = {f"cold_{each}": options["cold"] for each in "kv"} if "cold" in options else {}
    given = cold | {key: value for key, value in options.items() if key != "cold"}
    return {KEYS[key]: _parse_value(spec, key, value) for key, value in given.items()}


def _parse_value(spec: str, key: str, value: str) -> str | int | float | bool:
    if key in ("bits", "v_skip"):
        return _parse_float(spec, key, value)
    if key in ("threshold", "group", "sinks", "draft"):
        return _parse_int(spec, key, value)
    if key == "budget":
        try:
            return parse_size(value)
        except ValueError as error:
            raise ValueError(f"kv={spec!r}: budget={error}") from None
    if key in _WORDS:
        return value if value in _WORDS[key] else _parse_int(spec, key, value)
    if key not in ("equalize", "shrink"):
        return value
    if value not in ("true", "false"):
        raise ValueError(f"kv={spec!r}: {key}={value} is neither true nor false")
    return value == "true"


def _parse_float(spec: str, key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"kv={spec!r}: {key}={value} is not a number") from None


def _parse_int(spec: str, key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= len(str(INT32_MAX))):
        raise ValueError(f"kv={spec!r}: {key}={value} is not a whole number")
    return int(value)
