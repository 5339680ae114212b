"""Texts that a constraint allows, found by taking tokens at random; schemas at random."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from mixedkv.constrain.constraint import Matcher

# single bytes, and two tokens that end an answer
BYTEWISE = ([*(bytes([byte]) for byte in range(256)), b"\xff<end>", b"\xff<turn>"], [256, 257])
_MAX_TOKENS = 600
_CLOSING = (b'"', b"}", b"]", b":", b"0", b"1", b"a", b"-", b"T", b"Z")  # in the order they are taken


def follow(matcher: Matcher, text: str) -> bool:
    """Whether the whole text is allowed, byte by byte, and can end there."""
    for byte in text.encode():
        if not matcher.allows(byte):
            return False
        matcher.accept(byte)
    return BYTEWISE[1][0] in matcher.allowed()


def random_answer(
    matcher: Matcher, tokens: list[bytes], ends: list[int], random_seed: int, free: int = 30
) -> bytes | None:
    """A complete text. After `free` tokens whatever closes is taken; None if it still does not end."""
    rng = random.Random(random_seed)
    taken: list[int] = []
    first = {token: i for i, token in reversed(list(enumerate(tokens)))}
    closing = [first[text] for text in _CLOSING if text in first]
    for n in range(_MAX_TOKENS):
        allowed = matcher.allowed()
        done = bool(np.isin(ends, allowed).any())
        if done and (len(allowed) <= len(ends) or n > free or rng.random() < 0.5):
            return b"".join(tokens[token] for token in taken)
        token = _pick(allowed, closing, ends, rng, n > free)
        assert matcher.allows(token)
        matcher.accept(token)
        taken.append(token)
    return None


def _pick(
    allowed: npt.NDArray[np.int32], closing: list[int], ends: list[int], rng: random.Random, close: bool
) -> int:
    if close:
        for token in closing:
            if token in allowed:
                return token
    return rng.choice([int(token) for token in allowed if token not in ends])


# --- schemas ---

_NAMES = st.sampled_from(["a", "b", "name", "x y", "é", 'q"\\', "$ref", "not", "type"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 10**12) | st.text('ab"\\\n\u00e9\U0001f600/', max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_NAMES, inner, max_size=2),
    max_leaves=4,
)
_PATTERNS = st.sampled_from(
    ["^a$", "^[a-f]{2,4}$", "^\\d{4}-[0-9]+$", "^(foo|bar)?x*$", "^[^\"]{1,3}$", "^(a[b-d]*x)?[0-9]{2,3}$",
     "^$", "^\\w+@\\w+\\.com$", "^\"\\\\\\n[é一]$", "^.{3}$"]
)  # fmt: skip
_FORMATS = st.sampled_from(["date", "time", "date-time", "uuid", "uuid4"])


def _bounded(kind: str, low: str, high: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A type with none, one or both of two bounds, the lower one first."""

    def build(pair: list[Any], which: set[str]) -> dict[str, Any]:
        bounds = {low: min(pair), high: max(pair)}
        return {"type": kind, **{name: bound for name, bound in bounds.items() if name in which}}

    pairs = st.lists(values, min_size=2, max_size=2)
    return st.builds(build, pairs, st.sets(st.sampled_from([low, high])))


_FLOATS = st.integers(-(10**6), 10**6).map(lambda n: n / 1000)
_LEAVES = st.one_of(
    st.sampled_from(
        [{"type": kind} for kind in ("integer", "number", "string", "boolean", "null", "object")]
    ),
    st.lists(st.sampled_from(["integer", "null", "string"]), min_size=1, max_size=3, unique=True).map(
        lambda kinds: {"type": kinds}
    ),
    _bounded("integer", "minimum", "maximum", st.integers(-5000, 10**10)),
    _bounded("number", "minimum", "maximum", _FLOATS),
    _bounded("string", "minLength", "maxLength", st.integers(0, 12)),
    _PATTERNS.map(lambda pattern: {"type": "string", "pattern": pattern}),
    _FORMATS.map(lambda name: {"type": "string", "format": name}),
    st.lists(_VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    _VALUES.map(lambda value: {"const": value}),
    st.sampled_from([{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}, {}, True]),
)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(properties: dict[str, Any], required: set[str], others: Any, typed: bool) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "object"} if typed else {}
        schema |= {"properties": properties, "required": sorted(required & properties.keys())}
        return schema if others is None else {**schema, "additionalProperties": others}

    others = st.none() | st.booleans() | inner
    return st.builds(
        build, st.dictionaries(_NAMES, inner, max_size=3), st.sets(_NAMES), others, st.booleans()
    )


def _arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    bounds = _bounded("array", "minItems", "maxItems", st.integers(0, 4))
    lists = st.builds(lambda items, bound: {**bound, "items": items}, inner, bounds)
    return lists | st.lists(inner, min_size=1, max_size=3).map(lambda items: {"prefixItems": items})


def _unions(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=3).map(lambda members: {"anyOf": members})
    apart = st.sampled_from(["x", "y"]).map(
        lambda word: {"oneOf": [{"type": "integer"}, {"enum": [word, None]}, {"$ref": "#/$defs/two"}]}
    )
    tagged = st.tuples(inner, inner).map(
        lambda pair: {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": f"{i}"}, "v": value}, "required": ["k"]}
                for i, value in enumerate(pair)
            ]
        }
    )
    return some | apart | tagged


def schemas() -> st.SearchStrategy[Any]:
    """Of all kinds that were taken when schemas became GBNF. References may lead back to the whole."""
    parts = st.recursive(
        _LEAVES, lambda inner: st.one_of(_objects(inner), _arrays(inner), _unions(inner)), max_leaves=6
    )
    leaf = _LEAVES.filter(lambda schema: schema is not True and "$ref" not in schema)
    two = st.builds(lambda value: {"type": "object", "properties": {"up": {"$ref": "#"}, "v": value}}, leaf)

    def build(part: Any, one: Any, two: Any) -> dict[str, Any]:
        return {"type": "array", "items": part, "maxItems": 3, "$defs": {"one": one, "two": two}}

    return st.builds(build, parts, leaf, two)
