"""JSON schemas and patterns as grammars: literals are literals, and a text is read in one way, or few."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixedkv.server.json_schema import schema_grammar
from mixedkv.server.patterns import parser as re_parser
from mixedkv.server.patterns import pattern_gbnf, quoted

# --- schemas ---


def test_a_schema_becomes_a_grammar() -> None:
    assert "root ::=" in schema_grammar({"type": "object", "properties": {"a": {"type": "integer"}}})


def chain(depth: int, link: Callable[[dict[str, str]], dict[str, object]]) -> dict[str, object]:
    """A schema of definitions, each made of the one before."""
    definitions: dict[str, object] = {"a_0": {"const": 1}}
    for i in range(depth):
        definitions[f"a_{i + 1}"] = link({"$ref": f"#/$defs/a_{i}"})
    return {"type": "array", "items": {"$ref": f"#/$defs/a_{depth}"}, "$defs": definitions}


def both(name: str) -> Callable[[dict[str, str]], dict[str, object]]:
    """Objects that differ after their first member only: both stay possible while that is written."""

    def link(ref: dict[str, str]) -> dict[str, object]:
        members = [{"a": ref, "b": {"const": i}} for i in (1, 2)]
        return {name: [{"properties": both, "required": ["a", "b"]} for both in members]}

    return link


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}, "maxItems": 10**8},
        {"type": "string", "pattern": "^(a{900}){900}$"},
        {"$ref": "https://example.org/schema.json"},
        {"$ref": "#/definitions/none"},
        {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}},
        {"type": "oddity"},
        {"enum": ["x" * 100_000]},
        {"enum": []},
        {"anyOf": []},
        {"oneOf": {}},
        {"type": []},
        {"enum": ["\ud800"]},
        {"const": float("nan")},
        {"properties": 5},
        {"type": "string", "pattern": "("},
        {"type": "string", "pattern": "^]"},
        chain(12, both("anyOf")),
        {**chain(12, both("oneOf")), "anyOf": [{}]},
    ],
)
def test_a_schema_that_cannot_be_followed_is_an_error(schema: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="json_schema"):
        schema_grammar(schema)


@pytest.mark.parametrize(
    "schema",
    [
        chain(25, lambda ref: {"type": "object", "properties": {"a": ref, "b": ref}}),
        chain(7, both("anyOf")),
        {"properties": {chr(0x4E00 + i): {"type": "null"} for i in range(150)}},
    ],
)
def test_a_schema_takes_time_by_its_size(schema: dict[str, object]) -> None:
    """Without end, or without memory, if each step doubles it."""
    assert len(schema_grammar(schema)) < 1_000_000


@pytest.mark.parametrize("text", ['\\" | root "a', 'a"b\\', "\n\x00", "\u00e9\U0001f600", "$& \\u0041"])
def test_a_schemas_text_is_a_literal(text: str) -> None:
    """In the grammar it has nothing but letters, digits and escapes: none of it is syntax."""
    for schema in ({"const": text}, {"enum": [text]}, {"type": "object", "properties": {text: {}}}):
        literals = re.findall(r'"(?:[A-Za-z0-9 _]|\\u[0-9A-F]{4}|\\U[0-9A-F]{8})*"', schema_grammar(schema))
        assert quoted(json.dumps(text, ensure_ascii="properties" in schema)) in literals


# --- patterns ---


@pytest.mark.parametrize(
    ("pattern", "gbnf"),
    [
        ("^a$", '"a"'),
        ("^a[b-d]*$", '"a" ([b-d]){0,}'),
        ("^\\d{4}$", "([0-9]){4,4}"),
        ("^(a|bc)?$", '((("a" | "b" "c"))){0,1}'),
        ("^(foo|food|bar)$", '(("f" ("o" ("o" ("" | "d"))) | "b" "a" "r"))'),
        ("^]}$", '"\\u005D" "\\u007D"'),
        ('^"$', '"\\u005C\\u0022"'),
        ("^\\n$", '"\\u005Cn"'),
        ("^[^b]$", "[ -\\u0021\\u0023-\\u005B\\u005D-ac-\\U0010FFFF]"),
        ("^\U0001f600$", '"\\U0001F600"'),
        ("^$", '""'),
    ],
)
def test_a_pattern_becomes_gbnf(pattern: str, gbnf: str) -> None:
    assert pattern_gbnf(pattern) == gbnf


@pytest.mark.parametrize(
    "pattern",
    [
        "a", "^a", "^a\\$", "^" + "a" * 3000 + "$",
        "^(?i)a$", "^(?=a)b$", "^(a)\\1$", "^\\p{L}$", "^\\bx$", "^[\\x00-\\x05]$",
        # readings that grow with the text
        "^a?a?$", "^(a|a*)$", "^(a*)*$", "^(a?){2}$", "^a*a*$", "^.*foo$", "^(ab?){1,3}b$", "^(a*|b*)$",
        "^([a-m]x|[k-z]y)*$", "^[^a][^b]*b?c*$", "^(|a)+$",
        # more rules than llama.cpp takes
        "^(a{0,40}b){60}$", "^((a|b){30}c?){700}$",
    ],
)  # fmt: skip
def test_a_pattern_that_can_be_read_in_several_ways_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        pattern_gbnf(pattern)


@given(st.recursive(st.sampled_from("abc"), lambda inner: st.one_of(
    st.lists(inner, min_size=1, max_size=3).map("".join),
    st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
    st.tuples(inner, st.sampled_from("?*+")).map(lambda pair: f"({pair[0]}){pair[1]}"),
), max_leaves=8), st.text("abc", max_size=6))  # fmt: skip
def test_a_pattern_that_is_taken_is_read_in_one_way(pattern: str, text: str) -> None:
    try:
        gbnf = pattern_gbnf(f"^{pattern}$")
    except ValueError:
        return
    n = readings(gbnf, text)
    assert n == bool(re.fullmatch(pattern, text))


def readings(gbnf: str, text: str) -> int:
    """In how many ways a text is read, found by trying all: GBNF of literals, groups and repetitions is a
    regular expression but for its spaces and quotes.
    """
    tree = parse_regex(gbnf.replace('""', "()").replace('"', "").replace(" ", ""))
    return sum(end == len(text) for end in ends(tree, text, 0))


def parse_regex(pattern: str) -> list[Any]:
    return list(re_parser.parse(pattern))


def ends(nodes: list[Any], text: str, at: int) -> Iterator[int]:
    """Where the ways to read a beginning of text[at:] end, one by one."""
    if not nodes:
        yield at
        return
    for middle in ends_of_one(*nodes[0], text, at):
        yield from ends(nodes[1:], text, middle)


def ends_of_one(kind: Any, value: Any, text: str, at: int) -> Iterator[int]:
    name = str(kind)
    if name == "LITERAL":
        if text[at : at + 1] == chr(value):
            yield at + 1
    elif name == "IN":
        low_high = [v if str(k) == "RANGE" else (v, v) for k, v in value]
        if at < len(text) and any(low <= ord(text[at]) <= high for low, high in low_high):
            yield at + 1
    elif name == "SUBPATTERN":
        yield from ends(list(value[3]), text, at)
    elif name == "BRANCH":
        for nodes in value[1]:
            yield from ends(list(nodes), text, at)
    elif name == "MAX_REPEAT":
        low, high, nodes = value
        if low == 0:
            yield at
        if int(high) > 0:
            for middle in ends(list(nodes), text, at):
                if middle > at or low > 0:
                    rest = (kind, (max(0, low - 1), high if high > 1000 else high - 1, nodes))
                    yield from ends_of_one(*rest, text, middle)
    else:
        raise AssertionError(name)
