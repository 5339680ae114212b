"""Schemas that are large or nested, texts that look like syntax, patterns."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixedkv.constrain.constraint import ConstraintCompiler
from mixedkv.constrain.constraint_text import Constraint
from mixedkv.constrain.json_schema import _types, closed_schema
from mixedkv.errors import DeadEndError
from support.engine.constraints import BYTEWISE, follow, random_answer

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def bytewise() -> ConstraintCompiler:
    return ConstraintCompiler.of_tokens(*BYTEWISE)


def schema_of(schema: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(schema), "schema")


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


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {**chain(12, both("oneOf")), "anyOf": [{}]},  # no member excludes the other while "a" is written
        {"properties": {f"p{i}": {} for i in range(1001)}},
        nested(500),
        chain(2001, lambda ref: ref),  # llguidance's stack
        chain(600, lambda ref: {"properties": {"a": {"items": {"anyOf": [ref, {"type": "null"}]}}}}),
        {"type": "string", "pattern": "^]]$("},
        {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(10)]},
        {"type": "number", "multipleOf": 0.000001234567},
    ],
)
def test_a_schema_that_cannot_be_followed_is_an_error(bytewise: ConstraintCompiler, schema: Any) -> None:
    with pytest.raises(ValueError, match=r"^schema: "):
        bytewise.compile(schema_of(schema))


@pytest.mark.parametrize(
    "schema",
    [
        chain(25, lambda ref: {"type": "object", "properties": {"a": ref, "b": ref}}),
        chain(7, both("anyOf")),
        chain(12, both("anyOf")),
        chain(40, lambda ref: {"allOf": [ref, ref]}),
        chain(1000, lambda ref: ref),
        {"properties": {chr(0x4E00 + i): {"type": "null"} for i in range(150)}},
        {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}},
        {"anyOf": [{"$ref": "#/$defs/a"}, {"const": 1}], "$defs": {"a": {"items": {"$ref": "#"}}}},
        {"type": "array", "items": {"type": "integer"}, "maxItems": 10**8},
        {"type": "string", "maxLength": 10**9},
        {"enum": [f"x{i}" for i in range(6000)]},
        {"enum": ["x" * 60_000]},
        nested(100),
        {"type": "object", "properties": {f"p{i}": {} for i in range(900)}},  # each may come next
        *(
            {"type": "string", "pattern": pattern}
            for pattern in ("^(a{900}){900}$", "^(a?){40}a{40}$", "^(a|a)*$", ".*foo", "[a-z].{100}$")
        ),
    ],
)
def test_what_could_take_long_is_followed_or_fails_alone(bytewise: ConstraintCompiler, schema: Any) -> None:
    tokens, ends = BYTEWISE
    matcher = bytewise.compile(schema_of(schema))
    try:
        text = random_answer(matcher, tokens, ends, random_seed=1)
    except DeadEndError as error:
        assert "too much" in str(error)  # noqa: PT017
    else:
        assert text is None or json.loads(text) is not ...


@pytest.mark.parametrize("text", ['\\" | root "a', 'a"b\\', "\n\x00", "\u00e9\U0001f600", "$& \\u0041"])
def test_a_schemas_text_is_a_literal(bytewise: ConstraintCompiler, text: str) -> None:
    written = json.dumps(text, ensure_ascii=False)
    for schema in ({"const": text}, {"enum": [text]}):
        assert follow(bytewise.compile(schema_of(schema)), written)
        assert not follow(bytewise.compile(schema_of(schema)), json.dumps(text + "a", ensure_ascii=False))
    named = {"type": "object", "properties": {text: {"const": 1}}, "required": [text]}
    assert follow(bytewise.compile(schema_of(named)), f"{{{written}:1}}")
    assert not follow(bytewise.compile(schema_of(named)), '{"a":1}')


# --- patterns ---


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("^a$", ["a"], ["", "b", "aa"]),
        ("^a[b-d]*$", ["a", "abcd"], ["abe"]),
        ("^\\d{4}$", ["1234"], ["123", "12345", "\u0661\u0662\u0663\u0664"]),
        ("^(a|bc)?$", ["", "a", "bc"], ["b"]),
        ("^(foo|food|bar)$", ["foo", "food", "bar"], ["fo"]),
        ("^]}$", ["]}"], ["}"]),
        ('^"$', ['"'], ["'"]),
        ("^\\n$", ["\n"], ["n"]),
        ("^[^b]$", ["a", "\u00e9", "\U0001f600", '"', "\n"], ["b"]),
        ("^\U0001f600$", ["\U0001f600"], ["\U0001f601"]),
        ("^$", [""], ["a"]),
        ("b", ["b", "abc"], ["ac"]),  # anywhere
        ("^a?a?$", ["", "a", "aa"], ["aaa"]),
        ("^.*foo$", ["foo", "xfoofoo"], ["fo"]),
        ("^(?i)aB$", ["ab", "AB"], ["a"]),
        ("^\\p{L}$", ["\u00e9"], ["1"]),
    ],
)
def test_a_pattern_is_followed(
    bytewise: ConstraintCompiler, pattern: str, good: list[str], bad: list[str]
) -> None:
    for text in (*good, *bad):
        matcher = bytewise.compile(schema_of({"type": "string", "pattern": pattern}))
        assert follow(matcher, json.dumps(text, ensure_ascii=False)) == (text in good), text


@given(st.recursive(st.sampled_from("abc"), lambda inner: st.one_of(
    st.lists(inner, min_size=1, max_size=3).map("".join),
    st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
    st.tuples(inner, st.sampled_from("?*+")).map(lambda pair: f"({pair[0]}){pair[1]}"),
), max_leaves=8), st.text("abc", max_size=6))  # fmt: skip
def test_a_pattern_takes_what_re_takes(bytewise: ConstraintCompiler, pattern: str, text: str) -> None:
    matcher = bytewise.compile(schema_of({"type": "string", "pattern": f"^({pattern})$"}))
    assert follow(matcher, json.dumps(text)) == bool(re.fullmatch(pattern, text))


def _links(n: int) -> dict[str, Any]:
    """Definitions that refer to each other, up to an object."""
    links: dict[str, Any] = {str(i): {"$ref": f"#/d/{i + 1}"} for i in range(n)}
    kind = {"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"]}
    return {**links, str(n): kind}


_NAMES = [f"r{i}" for i in range(60)]
_SAME = {"type": "object", "properties": {name: {"enum": ["a", "b"]} for name in _NAMES}, "required": _NAMES}
BOMBS: dict[str, dict[str, Any]] = {
    "members that refer": {"d": _links(98), "oneOf": [{"$ref": "#/d/0"}] * 2500},
    "members of their own": {"d": _links(98), "oneOf": [{"$ref": f"#/d/{i % 98}"} for i in range(2500)]},
    "constants": {"oneOf": [{"const": str(i)} for i in range(3000)]},
    "lists": {"oneOf": [{"oneOf": [{"const": f"{i} {j}"} for j in range(50)]} for i in range(50)]},
    "required": {"oneOf": [_SAME] * 40},
}


@pytest.mark.parametrize("name", BOMBS)
def test_members_are_compared_once(name: str) -> None:
    """They were compared again for each member: minutes for 50 KB."""
    began = time.thread_time()
    closed_schema(BOMBS[name])
    assert time.thread_time() - began < 1


def test_members_are_counted_before_they_are_compared() -> None:
    with pytest.raises(
        ValueError, match="its allOf, anyOf and oneOf have 5000 members, at most 4096 are taken"
    ):
        closed_schema({"anyOf": [{"oneOf": [{}] * 4999}]})


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        (True, set()),
        ({}, set()),
        ({"enum": 5}, set()),
        ({"const": None}, {"null"}),
        ({"const": 5, "type": "string"}, {"number"}),  # the value says it
        ({"const": 5, "enum": ["a"]}, {"number"}),
        ({"enum": [True, 1.5, "a"]}, {"boolean", "number", "string"}),
        ({"enum": 5, "type": "array"}, {"array"}),
        ({"type": "object"}, {"object"}),
        ({"type": "integer"}, {"number"}),
        ({"type": ["integer", "number", "null"]}, {"number", "null"}),
    ],
)
def test_the_types_that_a_schema_allows(schema: Any, types: set[str]) -> None:
    assert _types(schema) == types
