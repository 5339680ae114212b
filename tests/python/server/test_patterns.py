"""Regular expressions over texts of any length: none takes the square of it."""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import pytest

import mixedkv

pytestmark = pytest.mark.full

_N = 2000  # characters
_SECONDS = 2e-3  # of a processor: what takes less is not looked at again
_TIMES = 5  # what a text of this many times the length takes, where it takes about the square
_PARTS = [*"\"'[](){}<>|\\/#.,:;=-_ \n\t", "a", "A", "0"]
_METHODS = ("match", "fullmatch", "search", "finditer", "findall", "sub", "split")


class _Pattern(NamedTuple):
    pattern: re.Pattern[Any]
    methods: frozenset[str]  # that its module calls


def _patterns() -> Iterator[tuple[str, _Pattern]]:
    """All patterns of modules, by their names."""
    for module in pkgutil.walk_packages(mixedkv.__path__, "mixedkv."):
        if module.name.endswith("__main__") or ".ray" in module.name:
            continue
        with suppress(ImportError):  # of an extra that is not installed
            found = importlib.import_module(module.name)
            for name, value in vars(found).items():
                if isinstance(value, re.Pattern):
                    called = re.findall(rf"\b{name}\.(\w+)\(", inspect.getsource(found))
                    methods = frozenset(called) & {*_METHODS}
                    yield f"{module.name}.{name}", _Pattern(value, methods or frozenset(["finditer"]))


PATTERNS = dict(_patterns())


def _texts(pattern: re.Pattern[Any]) -> Iterator[tuple[str, str]]:
    """How texts begin, and what they go on with."""
    literals = re.findall(r"[\w '\"]{2,}", str(pattern.pattern))[:4]
    parts = [*_PARTS, *literals]
    yield from itertools.product([*parts[:4], *literals], parts)
    yield from (("", one + other) for one, other in itertools.permutations(parts, 2))


def _seconds(pattern: _Pattern, begin: str, part: str, n: int) -> float:
    """What going through a text of n characters takes, of a processor."""
    text: Any = begin + part * (n // len(part))
    text = text.encode() if isinstance(pattern.pattern.pattern, bytes) else text
    began = time.thread_time()
    for method in pattern.methods:
        if method in ("match", "fullmatch", "search"):
            getattr(pattern.pattern, method)(text)
        else:
            sum(1 for _ in pattern.pattern.finditer(text))
    return time.thread_time() - began


def _squares(pattern: _Pattern) -> str:
    """A text that the pattern takes the square of; "" if there is none."""
    for begin, part in _texts(pattern.pattern):
        seconds = _seconds(pattern, begin, part, _N)
        if seconds < _SECONDS:
            continue
        seconds = min(seconds, _seconds(pattern, begin, part, _N))
        if _seconds(pattern, begin, part, _TIMES * _N) > 2 * _TIMES * seconds:
            return f"{begin!r} and many {part!r}"
    return ""


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_takes_time_by_the_length_of_the_text(name: str) -> None:
    assert not (text := _squares(PATTERNS[name])), f"{PATTERNS[name].pattern} takes the square of {text}"


@pytest.mark.parametrize("pattern", [r'"(?:\\.|[^"\\])*"', r"\[(?:\\.|[^\]\\])*\]"])
def test_the_square_is_noticed(pattern: str) -> None:
    assert _squares(_Pattern(re.compile(pattern), frozenset(["sub"])))
