"""Checks of single fields of a setting."""

from __future__ import annotations

from mixedkv.config.row_types import replacement
from mixedkv.limits import INT32_MAX


def check_window(quantization_threshold: int, group_size: int, sink_tokens: int) -> None:
    """Raise ValueError or TypeError unless the three can stand together."""
    check_int("quantization_threshold", quantization_threshold, at_least=0)
    check_int("group_size", group_size, at_least=1)
    check_int("sink_tokens", sink_tokens, at_least=0)
    if 0 < quantization_threshold < group_size:
        raise ValueError(
            f"quantization_threshold={quantization_threshold} is smaller than group_size={group_size} "
            f"(16 unless given): a window cannot let go of more than it holds. Use "
            f"group_size={quantization_threshold} or less, or quantization_threshold={group_size} or more "
            f"(0: no recent window)"
        )


def check_int(field: str, value: object, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{field}={value!r}: use a whole number")
    if not at_least <= value <= INT32_MAX:
        raise ValueError(f"{field}={value}: use a number from {at_least} to {INT32_MAX}")


def normalise(setting: object, field: str, known: tuple[str, ...]) -> None:
    value = getattr(setting, field)
    if not isinstance(value, str):
        raise TypeError(f"{field}={value!r}: use one of {', '.join(known)}")
    if value.lower() not in known:
        raise ValueError(f"{field}={value!r} is not one of {', '.join(known)}{replacement(value.lower())}")
    object.__setattr__(setting, field, value.lower())
