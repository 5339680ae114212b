"""Numbers in answers that follow a schema end, even if the model would go on with digits."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from mixedkv.constrain.constraint import ConstraintCompiler, Matcher
from mixedkv.constrain.constraint_text import Constraint
from mixedkv.constrain.json_schema import NumberLength
from support.engine.constraints import BYTEWISE, follow

pytestmark = pytest.mark.core

END = BYTEWISE[1][0]


@pytest.fixture(scope="module")
def bytewise() -> ConstraintCompiler:
    return ConstraintCompiler.of_tokens(*BYTEWISE)


def compiled(compiler: ConstraintCompiler, schema: Any) -> Matcher:
    return compiler.compile(Constraint("json_schema", json.dumps(schema), "schema"))


def longest(matcher: Matcher, expected: bytes) -> str:
    """What a model writes that wants the first of these bytes that is allowed, and then the end."""
    text = bytearray()
    while len(text) < 500:
        allowed = matcher.allowed()
        token = next((byte for byte in expected if byte in allowed and matcher.allows(byte)), None)
        if token is None:
            if END in allowed:
                return text.decode()
            token = int(allowed[0])
        matcher.accept(token)
        text.append(token)
    raise AssertionError(f"it does not end: {bytes(text)!r}")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer"},
        {"type": "integer", "maximum": 99},
        {"type": "integer", "minimum": 3},
        {"type": "integer", "multipleOf": 7},
        {"type": ["integer", "null"]},
        {"type": "number"},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "number", "exclusiveMaximum": 5},
        {"anyOf": [{"type": "integer", "maximum": 99}, {"type": "null"}]},
        {"type": "array", "items": {"type": "number"}, "maxItems": 2},
    ],
)
@pytest.mark.parametrize("expected", [b"-1234567890.[]", b"[-.eE+9876543210]", b"[0.3]", b"[-9e+9]"])
def test_a_number_ends(bytewise: ConstraintCompiler, schema: Any, expected: bytes) -> None:
    text = longest(compiled(bytewise, schema), expected)
    assert len(text) <= 100
    json.loads(text)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer"}, "-9000000000000000000"),
        ({"type": "integer"}, "1180591620717411303"),
        ({"type": "number"}, "6.02214076e23"),
        ({"type": "number"}, "-0.12345678901234567"),
        ({"type": "string"}, json.dumps("1" * 60)),
        ({"type": "object"}, json.dumps({'a\\"1': "\\", "b" + "2" * 40: "3" * 40})),
        ({"type": "array", "items": {"type": "integer"}}, json.dumps([10**15] * 10)),
    ],
)
def test_what_is_of_a_common_length_is_taken(bytewise: ConstraintCompiler, schema: Any, text: str) -> None:
    assert follow(compiled(bytewise, schema), text)


def test_a_copy_counts_for_itself(bytewise: ConstraintCompiler) -> None:
    matcher = compiled(bytewise, {"type": "number"})
    for _ in range(15):
        matcher.accept(ord("1"))
    other = matcher.copy()
    for _ in range(5):
        other.accept(ord("1"))
    assert not other.allows(ord("1"))
    assert matcher.allows(ord("1"))
    assert matcher.follow(b"11111")
    assert ord("1") not in matcher.allowed()


def test_a_text_is_read_in_any_pieces() -> None:
    text = json.dumps({"a": [1.5e10, -3, 'x"123\\', True, None], "12": 10**19}).encode()
    rng = np.random.default_rng(0)
    whole = NumberLength()
    whole.read(text)
    for _ in range(20):
        cuts = sorted(rng.integers(0, len(text), 5).tolist())
        parts = NumberLength()
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            parts.read(text[begin:end])
        assert parts == whole
