"""Reads values on the command line, declares -n, and names missing extras."""

from __future__ import annotations

import contextlib
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterator
from typing import TypeVar

from mixedkv.limits import INT32_MAX
from mixedkv.sizes import GB, parse_duration, parse_size
from mixedkv.streaming.layer_choice import Asked, parse_layers

T = TypeVar("T")


def add_n_predict(parser: ArgumentParser, default: int = 128) -> None:
    """Declare -n, the maximum length of an answer."""
    parser.add_argument(
        "-n",
        "--n-predict",
        metavar="N",
        type=length,
        default=default,
        help=f"most tokens to generate; -1 is as many as fit (default: {default})",
    )


def positive(text: str) -> int:
    """Parse a whole number, 1 or more."""
    if not (text.isascii() and text.isdigit() and 0 < int(text[:10]) <= INT32_MAX and len(text) <= 10):
        raise ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def integer(text: str) -> int:
    """Parse a whole number, which may be below zero."""
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a whole number") from None


def length(text: str) -> int:
    """Parse the length of an answer; -1 is up to its end or that of the context."""
    try:
        return -1 if text == "-1" else positive(text)
    except ArgumentTypeError:
        raise ArgumentTypeError(f"{text!r} is not a number of tokens: use 1 or more, or -1 for all") from None


def temperature(text: str) -> float:
    """Parse a temperature, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a temperature: use 0 or more")
    return value


def whole(text: str) -> int:
    """Parse a whole number, 0 or more."""
    try:
        return 0 if text == "0" else positive(text)
    except ArgumentTypeError:
        raise ArgumentTypeError(f"{text!r} is not a whole number of 0 or more") from None


def decimal(text: str) -> float:
    """Parse a number."""
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number") from None


def layer_count(text: str) -> int:
    """Parse a number of layers, 0 or more; -1 is all of them."""
    if text == "-1":
        return -1
    try:
        return whole(text)
    except ArgumentTypeError:
        raise ArgumentTypeError(f"{text!r} is not a number of layers: use 0 or more, or -1 for all") from None


def between(low: float, high: float) -> Callable[[str], float]:
    """Return a parser of numbers in this range."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise ArgumentTypeError(f"{text!r}: use a number from {low:g} to {high:g}")
        return value

    return number


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
