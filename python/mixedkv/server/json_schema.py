"""From a JSON schema to a grammar, by llama-cpp-python's converter where that holds against hostile schemas.

The grammar is evaluated inside llama.cpp, which follows all readings of a text at once, without a limit on
time or memory. So what a schema leaves open at a time is bounded here, and no text of a schema gets into the
grammar as anything but a literal.
"""

from __future__ import annotations

import json
import re
from typing import Any

from llama_cpp import llama_grammar

from mixedkv.server.patterns import pattern_gbnf, quoted

_MAX_SCHEMA = 1 << 16
_MAX_REPEAT = 2000  # llama.cpp's own limit
_MAX_READINGS = 256
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_UNIONS = ("anyOf", "oneOf")


def json_grammar() -> str:
    """GBNF of any JSON value."""
    return str(llama_grammar.JSON_GBNF)


def schema_grammar(schema: dict[str, Any]) -> str:
    """GBNF of a JSON schema.

    Raises:
        ValueError: the schema is too large, leaves too much open, or uses what the converter does not know.
    """
    try:
        text = json.dumps(schema)
        if len(text) > _MAX_SCHEMA:
            raise ValueError(f"it has {len(text)} characters, at most {_MAX_SCHEMA} are taken")
        json.dumps(schema, ensure_ascii=False).encode("utf-8")  # half a surrogate pair is no text
        _check(schema)
        _Readings(schema).count(schema)
        converter = _Converter(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)
        converter.visit(converter.resolve_refs(json.loads(text), "schema"), "")
        grammar = str(converter.format_grammar())
        if re.search(r"::=\s*$", grammar, re.MULTILINE):
            raise ValueError("a choice among nothing cannot be made")
        return grammar
    except RecursionError:
        raise ValueError("json_schema: nested too deep") from None
    except Exception as error:  # the converter asserts and indexes
        raise ValueError(
            f"json_schema: cannot be turned into a grammar: {str(error)[:500] or 'malformed'}"
        ) from None


class _Converter(llama_grammar.SchemaConverter):  # type: ignore[misc]
    """llama-cpp-python's, with literals and patterns that are what they say, and each reference once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._names: dict[str, str | None] = {}
        self._last: dict[str, int] = {}

    def _add_rule(self, name: str, rule: str) -> str:
        """Under a free name; the base class tries all numbers after it."""
        name = re.sub(r"[^a-zA-Z0-9-]+", "-", name)
        key = name
        while self._rules.get(key, rule) != rule:
            self._last[name] = self._last.get(name, -1) + 1
            key = f"{name}{self._last[name]}"
        self._rules[key] = rule
        return key

    def _format_literal(self, literal: str) -> str:
        return quoted(literal)

    def _generate_constant_rule(self, value: Any) -> str:
        return quoted(json.dumps(value, ensure_ascii=False, allow_nan=False))

    def _visit_pattern(self, pattern: str, name: str) -> str:
        return str(self._add_rule(name, f'"\\"" {pattern_gbnf(pattern)} "\\"" space'))

    def _resolve_ref(self, ref: str) -> str:
        if ref not in self._names:
            self._names[ref] = None
            self._names[ref] = str(self.visit(self._refs[ref], ref.split("/")[-1]))
        name = self._names[ref]
        if name is None:
            raise ValueError(f"$ref {ref[:100]!r} refers to itself")
        return name


def _check(node: Any) -> None:
    """Repetitions are written out, so a large number is a large grammar."""
    if isinstance(node, list):
        for item in node:
            _check(item)
    if isinstance(node, dict):
        for name in _COUNTS:
            value = node.get(name)
            if isinstance(value, (int, float)) and not 0 <= value <= _MAX_REPEAT:
                raise ValueError(f"{name}={value}: at most {_MAX_REPEAT} can be checked")
        for item in node.values():
            _check(item)


class _Readings:
    """How many readings of a text a schema can leave open at a time: those of alternatives add up, wherever
    they are nested, and each keeps a stack of its own.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        self._root = schema
        self._counts: dict[int, int] = {}

    def count(self, node: Any) -> int:
        """
        Raises:
            ValueError: more than `_MAX_READINGS`.
        """
        if not isinstance(node, (dict, list)):
            return 1
        if id(node) not in self._counts:
            self._counts[id(node)] = 1  # what refers to itself the converter refuses
            self._counts[id(node)] = n = self._count(node)
            if n > _MAX_READINGS:
                raise ValueError(f"its alternatives leave more than {_MAX_READINGS} ways to read an answer")
        return self._counts[id(node)]

    def _count(self, node: Any) -> int:
        if isinstance(node, list):
            return max(map(self.count, node), default=1)
        return max((self._count_member(name, value) for name, value in node.items()), default=1)

    def _count_member(self, name: str, value: Any) -> int:
        if name == "$ref" and isinstance(value, str):
            return self.count(self._target(value))
        if name in _UNIONS and isinstance(value, list):
            return sum(map(self.count, value))
        if name == "enum" and isinstance(value, list):
            return 1 + len(value) - len({json.dumps(item) for item in value})
        return self.count(value)

    def _target(self, ref: str) -> Any:
        node: Any = self._root
        for part in ref.split("/")[1:]:
            node = node.get(part) if isinstance(node, dict) else None
        return node
