"""JSON schema's `pattern` as GBNF for the inside of a JSON string.

llama.cpp follows all readings of a text at once, each with a stack of its own: where a pattern leaves more
than one, as `a?a?a?` and `(a|a)*` do, their number grows as a power of the text's length or worse. So a
pattern is taken only if each next character settles how it is read (it is LL(1); Brueggemann-Klein and Wood,
"One-unambiguous regular languages", 1998, have the theory).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

try:
    from re import _constants as codes
    from re import _parser as parser
except ImportError:  # Python 3.10
    import sre_constants as codes
    import sre_parse as parser

_MAX_LENGTH = 2000
_MAX_RULES = 2000  # llama.cpp's limit on what is repeated times how often
_BEYOND = 0x10000  # a bit per character; all beyond U+FFFF are the last one


def _bits(low: int, high: int) -> int:
    return (1 << (high + 1)) - (1 << low)


_ALL = _bits(0, _BEYOND)
_CONTROLS = _bits(0, 0x1F)
_PLAIN = _ALL & ~(_CONTROLS | _bits(ord('"'), ord('"')) | _bits(ord("\\"), ord("\\")))
_QUOTE = 1 << ord('"')  # what comes after the pattern
_DIGIT = _bits(ord("0"), ord("9"))
_WORD = _DIGIT | _bits(ord("A"), ord("Z")) | _bits(ord("a"), ord("z")) | 1 << ord("_")
_SPACE = _bits(0x09, 0x0D) | 1 << 0x20 | 1 << 0xA0 | 1 << 0xFEFF | _bits(0x2028, 0x2029)
_CATEGORIES = {
    codes.CATEGORY_DIGIT: _DIGIT,
    codes.CATEGORY_NOT_DIGIT: _ALL & ~_DIGIT,
    codes.CATEGORY_WORD: _WORD,
    codes.CATEGORY_NOT_WORD: _ALL & ~_WORD,
    codes.CATEGORY_SPACE: _SPACE,
    codes.CATEGORY_NOT_SPACE: _ALL & ~_SPACE,
}


def pattern_gbnf(pattern: str) -> str:
    """GBNF of the strings that a pattern matches, as JSON writes them, without the quotes.

    Raises:
        ValueError: the pattern is not `^...$`, uses what GBNF does not have, or can be read in several ways.
    """
    if len(pattern) > _MAX_LENGTH or not re.fullmatch(r"\^.*\$", pattern, re.DOTALL):
        raise ValueError(f"pattern: write ^...$, of {_MAX_LENGTH} characters at most")
    try:
        tree = parser.parse(pattern[1:-1])
    except (re.error, OverflowError) as error:
        raise ValueError(f"pattern: {error}") from None
    if tree.state.flags & ~re.UNICODE:
        raise ValueError("pattern: flags are not supported")
    whole = _sequence(tree)
    whole.check(_QUOTE)
    return whole.gbnf


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A part of a pattern.

    Attributes:
        first: the characters its texts begin with.
        empty: it matches the empty text too.
        n_rules: rules that llama.cpp makes of it.
    """

    gbnf: str
    first: int
    empty: bool = False
    n_rules: int = 0

    def check(self, follow: int) -> None:
        """
        Raises:
            ValueError: what a character means depends on what comes later; `follow` may come after this part.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence(_Part):
    parts: Sequence[_Part]

    def check(self, follow: int) -> None:
        for part in reversed(self.parts):
            part.check(follow)
            if part.empty:
                _check_apart(part.first, follow)
            follow = part.first | (follow if part.empty else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Branch(_Part):
    parts: Sequence[_Part]

    def check(self, follow: int) -> None:
        if sum(part.empty for part in self.parts) > 1:
            raise ValueError("pattern: more than one alternative can be empty")
        first = 0
        for part in self.parts:
            part.check(follow)
            _check_apart(first, part.first)
            first |= part.first


@dataclass(frozen=True, slots=True, kw_only=True)
class _Repeat(_Part):
    once: _Part
    again: bool  # a second time may come
    counted: bool  # exactly so many times

    def check(self, follow: int) -> None:
        if self.again and self.once.empty:
            raise ValueError("pattern: what can be empty is repeated")
        if not self.counted:
            _check_apart(self.once.first, follow)
        self.once.check(follow | (self.once.first if self.again else 0))


def _sequence(nodes: Any) -> _Part:
    parts = [_part(kind, value) for kind, value in nodes]
    first = 0
    for part in reversed(parts):
        first = part.first | (first if part.empty else 0)
    return _Sequence(
        gbnf=" ".join(part.gbnf for part in parts) or '""',
        first=first,
        empty=all(part.empty for part in parts),
        n_rules=sum(part.n_rules for part in parts),
        parts=parts,
    )


def _part(kind: Any, value: Any) -> _Part:
    if kind is codes.LITERAL:
        text = json.dumps(chr(value), ensure_ascii=False)[1:-1]
        return _Part(gbnf=quoted(text), first=1 << min(ord(text[0]), _BEYOND))
    if kind is codes.ANY:
        return _characters(_PLAIN)
    if kind is codes.NOT_LITERAL:
        return _characters(_ALL & ~_set([(codes.LITERAL, value)]))
    if kind is codes.IN:
        return _characters(_set(value))
    if kind is codes.SUBPATTERN and not (value[1] or value[2]):  # flags
        inner = _sequence(value[3])
        return replace(inner, gbnf=f"({inner.gbnf})", n_rules=1 + inner.n_rules)
    if kind is codes.BRANCH:
        return _branch([_sequence(nodes) for nodes in _factored(value[1])])
    if kind in (codes.MAX_REPEAT, codes.MIN_REPEAT):
        return _repeat(*value)
    raise ValueError(f"pattern: {str(kind).lower()} is not supported")


def _factored(branches: Any) -> Iterator[list[Any]]:
    """Alternatives that begin alike as one: `foo|food|bar` is `foo(|d)|bar`."""
    groups: dict[str, list[list[Any]]] = {}
    for nodes in map(list, branches):
        groups.setdefault(repr(nodes[0]) if nodes else "", []).append(nodes)
    for group in groups.values():
        if len(group) == 1 or not group[0]:
            yield group[0]
        else:
            yield [group[0][0], (codes.BRANCH, (None, [nodes[1:] for nodes in group]))]


def _branch(parts: Sequence[_Part]) -> _Part:
    first = 0
    for part in parts:
        first |= part.first
    return _Branch(
        gbnf=f"({' | '.join(part.gbnf for part in parts)})",
        first=first,
        empty=any(part.empty for part in parts),
        n_rules=1 + sum(part.n_rules for part in parts),
        parts=parts,
    )


def _repeat(low: int, high: Any, nodes: Any) -> _Part:
    once = _sequence(nodes)
    endless = high is codes.MAXREPEAT
    times = max(low, 1) if endless else int(high)
    if (1 + once.n_rules) * times > _MAX_RULES:
        raise ValueError("pattern: it repeats too much")
    if times == 0:
        return _sequence([])
    return _Repeat(
        gbnf=f"({once.gbnf}){{{low},{'' if endless else high}}}",
        first=once.first,
        empty=low == 0 or once.empty,
        n_rules=1 + once.n_rules + (1 if endless else high - low),
        once=once,
        again=endless or high > 1,
        counted=low == high,
    )


def _check_apart(some: int, others: int) -> None:
    if both := some & others:
        character = chr((both & -both).bit_length() - 1)
        raise ValueError(
            f"pattern: at {character!a} it can be read in several ways: write it so that each next "
            f"character settles what is meant"
        )


def _set(items: Any) -> int:
    bits, negated = 0, False
    for kind, value in items:
        if kind is codes.NEGATE:
            negated = True
        elif kind is codes.CATEGORY and value in _CATEGORIES:
            bits |= _CATEGORIES[value]
        elif kind in (codes.LITERAL, codes.RANGE):
            low, high = value if kind is codes.RANGE else (value, value)
            if high >= _BEYOND and high != 0x10FFFF:
                raise ValueError("pattern: characters beyond U+FFFF are not supported in [...]")
            bits |= _bits(low, min(high, _BEYOND))
        else:
            raise ValueError(f"pattern: {str(kind).lower()} is not supported in [...]")
    return _ALL & ~bits if negated else bits


def _characters(bits: int) -> _Part:
    """One of some characters; of those that JSON escapes none."""
    bits &= _PLAIN
    if not bits:
        raise ValueError("pattern: [...] has no character that JSON does not escape")
    ranges = "".join(f"{_escaped(low)}-{_escaped(high)}" for low, high in _runs(bits))
    return _Part(gbnf=f"[{ranges}]", first=bits)


def _runs(bits: int) -> Iterator[tuple[int, int]]:
    """First and last of the characters that are next to each other."""
    at = 0
    while bits:
        skip = (bits & -bits).bit_length() - 1
        bits, at = bits >> skip, at + skip
        n = (~bits & (bits + 1)).bit_length() - 1
        last = at + n - 1
        yield at, 0x10FFFF if last == _BEYOND else last
        bits, at = bits >> n, at + n


def quoted(text: str) -> str:
    """A GBNF literal of any text."""
    return '"' + "".join(_escaped(ord(character)) for character in text) + '"'


def _escaped(code: int) -> str:
    character = chr(code)
    if character.isascii() and (character.isalnum() or character in " _"):
        return character
    return f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"
