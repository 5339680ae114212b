"""Declares options, reads their values, and names missing extras."""

from __future__ import annotations

import contextlib
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from mixedkv.limits import INT32_MAX
from mixedkv.sizes import GB, parse_duration, parse_size
from mixedkv.streaming.layer_choice import Asked, parse_layers

T = TypeVar("T")
N = TypeVar("N", int, float)


def add(
    parser: Any,
    names: str | list[str],
    metavar: str,
    text: str,
    kind: Callable[[str], Any] = str,
    **more: Any,
) -> None:
    """Declare an option with a value, or an argument; a text may have several names."""
    all_names = names.split() if isinstance(names, str) else names
    parser.add_argument(*all_names, metavar=metavar, type=kind, help=text, **more)


def add_switch(parser: Any, name: str, text: str) -> None:
    """Declare an option without a value."""
    parser.add_argument(name, action="store_true", help=text)


def add_n_predict(parser: Any, default: int = 128) -> None:
    """Declare -n, the maximum length of an answer."""
    text = f"most tokens to generate; -1 is as many as fit (default: {default})"
    add(parser, "-n --n-predict", "N", text, length, default=default)


def number(kind: Callable[[str], N], low: float, high: float, wrong: str) -> Callable[[str], N]:
    """Return a parser of numbers in a range; `wrong` is said of others."""

    def read(text: str) -> N:
        with contextlib.suppress(ValueError):
            if "_" not in text and low <= (value := kind(text)) <= high:
                return value
        raise ArgumentTypeError(f"{text!r}{wrong}")

    return read


_ANY = float("inf")
integer = number(int, -_ANY, _ANY, " is not a whole number")
whole = number(int, 0, INT32_MAX, " is not a whole number of 0 or more")
positive = number(int, 1, INT32_MAX, " is not a positive whole number")
layer_count = number(int, -1, INT32_MAX, " is not a number of layers: use 0 or more, or -1 for all")
decimal = number(float, -_ANY, _ANY, " is not a number")
temperature = number(float, 0, 1e30, " is not a temperature: use 0 or more")


def length(text: str) -> int:
    """Parse the length of an answer; -1 is up to its end or that of the context."""
    try:
        return -1 if text == "-1" else positive(text)
    except ArgumentTypeError:
        raise ArgumentTypeError(f"{text!r} is not a number of tokens: use 1 or more, or -1 for all") from None


def between(low: float, high: float) -> Callable[[str], float]:
    """Return a parser of numbers in this range."""
    return number(float, low, high, f": use a number from {low:g} to {high:g}")


def layers(text: str) -> Asked:
    """Parse the value of --stream-layers."""
    return _value(parse_layers, text)


def memory(text: str) -> int:
    """Parse the value of --memory and --budget."""
    return _value(parse_size, text)


def gigabytes(text: str) -> float:
    """Parse a size; a number without a unit is in 10^9 bytes."""
    return _value(lambda text: parse_size(text, GB, least=0), text) / GB


def duration(text: str) -> float:
    """Parse the value of --max-age and --older-than, and return seconds."""
    return _value(parse_duration, text)


def _value(parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


@contextlib.contextmanager
def naming_the_extra(extra: str) -> Iterator[None]:
    """While inside, turn the error for a missing package into one that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("mixedkv"):
            raise
        raise ValueError(
            f"this command needs {error.name}, which is not installed: pip install 'mixedkv[{extra}]'"
        ) from None
