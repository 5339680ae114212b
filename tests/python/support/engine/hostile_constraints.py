"""Random schemas, expressions and grammars that are made to take long."""

from __future__ import annotations

import json
import random
import time
from typing import Any

from mixedkv.constrain.constraint import ConstraintCompiler
from mixedkv.constrain.constraint_text import Constraint

END = 256
BYTES = ConstraintCompiler.of_tokens([*(bytes([i]) for i in range(256)), b"\xff<end>"], [END])


def constraint(chance: random.Random) -> Constraint:
    kind = chance.choice(["json_schema", "json_schema", "json_schema", "regex", "gbnf"])
    if kind == "json_schema":
        return Constraint("json_schema", json.dumps(_root(chance)), "schema")
    if kind == "regex":
        return Constraint("regex", _regex(chance, 4), "regex")
    return Constraint("gbnf", _grammar(chance), "grammar")


def _many(chance: random.Random) -> int:
    return chance.choice([1, 2, 3, 8, 30, 200, 900])


def _root(chance: random.Random) -> dict[str, Any]:
    schema = _schema(chance, 3)
    if chance.random() < 0.3:
        n = _many(chance)
        steps = {
            f"n{i}": {
                "type": "object",
                "properties": {name: {"$ref": f"#/$defs/n{min(n, i + 1)}"} for name in "abc"},
                "required": chance.choice([["a"], ["a", "b", "c"]]),
            }
            for i in range(n)
        }
        schema = {"anyOf": [schema, {"$ref": "#/$defs/n0"}], "$defs": {**steps, f"n{n}": {"type": "null"}}}
    return schema


def _schema(chance: random.Random, depth: int) -> dict[str, Any]:
    if depth == 0:
        return chance.choice(
            [{"type": "string", "pattern": _regex(chance, 2)}, {"type": "integer"}, {"const": "x"}, {}]
        )
    inner, n = depth - 1, _many(chance) if depth > 1 else chance.randint(1, 4)
    kind = chance.choice(["object", "patterns", "array", "anyOf", "oneOf", "allOf", "enum", "number"])
    if kind == "object":
        properties = {f"p{i}": _schema(chance, inner if i < 3 else 0) for i in range(n)}
        return {
            "type": "object",
            "properties": properties,
            "required": chance.choice([[], [*properties]]),
            "additionalProperties": chance.choice([True, False, {"type": "integer"}]),
            **chance.choice([{}, {"minProperties": chance.randint(0, 9)}]),
        }
    if kind == "patterns":
        begin = chance.choice(["^", ""])
        patterns = {f"{begin}a{i}{_regex(chance, 1)}": _schema(chance, 0) for i in range(n)}
        return {"type": "object", "patternProperties": patterns}
    if kind == "array":
        items = _schema(chance, inner)
        return {"type": "array", "items": items, "minItems": n, "maxItems": n * chance.choice([1, 10, 10**6])}
    if kind in ("anyOf", "oneOf", "allOf"):
        if chance.random() < 0.5:
            return {kind: [_schema(chance, inner if i < 3 else 0) for i in range(n)]}
        pairs = [
            {"anyOf": [{"type": "object", "properties": {f"a{i}": {"const": j}}} for j in range(2)]}
            for i in range(min(n, 30))
        ]
        return {kind: pairs}
    if kind == "enum":
        return {"enum": ["x" * chance.randint(1, 40) + str(i) for i in range(n)]}
    return {"type": "number", "multipleOf": chance.choice([0.01, 7, 997, 1.5]), "minimum": -n, "maximum": n}


def _regex(chance: random.Random, depth: int) -> str:
    if depth == 0:
        return chance.choice(["a", "[a-z]", ".", r"\d", "[^x]", r"\w", "x"])
    inner = [_regex(chance, depth - 1) for _ in range(chance.choice([1, 2, 3, 12]))]
    body = chance.choice(["", "|"]).join(inner)
    low, high = chance.choice([(0, 3), (2, 50), (0, 999), (500, 1000)])
    return f"({body})" + chance.choice(["", "*", "+", "?", f"{{{low},{high}}}"])


def _grammar(chance: random.Random) -> str:
    n = min(_many(chance), 60)
    names = [chr(97 + i // 26) + chr(97 + i % 26) for i in range(n)]
    rules = []
    for name in ["root", *names]:
        ways = []
        for _ in range(chance.choice([1, 2, 9])):
            parts = [
                chance.choice(['"x"', '"ab"', "[a-z]", "[a-z]+", '("y" | "z")*', *names[:9]])
                for _ in range(chance.randint(1, 5))
            ]
            ways.append(" ".join(parts))
        rules.append(f"{name} ::= " + " | ".join(ways))
    return "\n".join(rules)


def compile_one(seed: int) -> tuple[float, str]:
    """Compile the constraint of a seed; return this process's seconds of a processor, and what came of it."""
    expected = constraint(random.Random(seed))
    began = time.process_time()
    try:
        BYTES.compile(expected)
    except ValueError as error:
        said = str(error)
        refused = "takes more than" in said
        return time.process_time() - began, "takes too long" if refused else "refused"
    return time.process_time() - began, "compiled"
