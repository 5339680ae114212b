"""Prepares JSON schemas for llguidance, and refuses keywords that it would not enforce, with their place."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

MAX_SCHEMA = 1 << 16  # characters
_MAX_DEPTH = 2000  # schemas in schemas, through all definitions: llguidance recurses
_MAX_PROPERTIES = 1000  # of one object: llguidance's time grows with the square
_MAX_BRANCHES = 4096  # members of all anyOf, oneOf and allOf
_MAX_NUMBER = 2**53  # llguidance computes with 64-bit floats
_MAX_INTEGER = 9 * 10**18  # where a schema sets no bound: 19 digits, as llguidance's 64 bits have
_MAX_REMAINDERS = 10_000  # of multipleOf; the compiler's time grows with them

_NOT_ENFORCED = frozenset({
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties",
    "$dynamicRef", "$recursiveRef", "x-guidance",
})  # fmt: skip
_NAMES = ("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
_UUID = "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-%s[0-9a-fA-F]{3}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"

_JSON_TYPES = {
    type(None): "null", bool: "boolean", int: "number", float: "number",
    str: "string", list: "array", dict: "object",
}  # fmt: skip

# where schemas are in schemas
_MAPS = ("properties", "patternProperties")
_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf")
_SINGLES = ("additionalProperties", "items", "additionalItems")
_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref")
_ENFORCED = frozenset({
    *_MAPS, *_LISTS, *_SINGLES, *_IN_PLACE, *_COUNTS, *_BOUNDS,
    "multipleOf", "required", "pattern", "format", "const", "enum",
})  # fmt: skip
# A schema without a type that has one of these means that type: `{"properties": ...}` is an object.
_MEANT = {
    "object": {*_MAPS, "additionalProperties", "required", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "additionalItems", "minItems", "maxItems"},
    "string": {"pattern", "format", "minLength", "maxLength"},
    "number": {*_BOUNDS, "multipleOf"},
}  # fmt: skip


def closed_schema(schema: Any) -> dict[str, Any]:
    """Return a stricter schema, without what the given one merely leaves open.

    An object that lists its properties has no others, unless `additionalProperties` says so. A tuple ends
    with its last item. A schema without a type has the type that its keywords are for. An integer without a
    bound has at most 19 digits. Otherwise models, small ones above all, fill an answer with whatever is
    allowed. Schemas that apply to the same value as others (under `allOf`, beside `$ref` or `anyOf`) stay
    open except for the digits, since closed ones could exclude each other.

    Raises:
        ValueError: a keyword cannot be enforced or has a bad value; the message names it and its place.
    """
    if not isinstance(schema, dict):
        raise ValueError("a schema must be an object")
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except RecursionError:
        raise ValueError("nested too deep") from None
    except UnicodeEncodeError:
        raise ValueError("half a surrogate pair is not text") from None
    root = json.loads(text)
    _check_branches(root)
    walk = _Walk(root)
    walk.run()
    return walk.root


def _check_branches(root: Any) -> None:
    """Refuse a schema with very many alternatives, before any is compared with another."""
    left, todo = _MAX_BRANCHES, [root]
    while todo:
        item = todo.pop()
        todo += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        lists = (item.get(name) for name in ("allOf", "anyOf", "oneOf")) if isinstance(item, dict) else ()
        left -= sum(len(members) for members in lists if isinstance(members, list))
    if left < 0:
        raise ValueError(
            f"its allOf, anyOf and oneOf have {_MAX_BRANCHES - left} members, at most {_MAX_BRANCHES} are "
            "taken"
        )


class _Walk:
    """Visits all schemas that a schema uses, each once as the only one for its value and once as one of
    several.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self._todo: list[tuple[Any, str, bool, int, int]] = []  # schema, place, alone, depth, definition
        self._nodes: dict[int, tuple[dict[str, Any], str]] = {}
        self._shared: set[int] = set()  # schemas that are not alone
        self._seen: set[tuple[int, bool]] = set()
        self._depths: dict[int, int] = {}  # of each definition
        self._depth = 0  # of all, one in the other
        self._exclusive: list[dict[str, Any]] = []  # with a oneOf that means the same as anyOf
        self._multiples = Fraction(1)
        self._apart: dict[int, bool] = {}  # lists of members, each compared once
        self._targets: dict[str, Any] = {}  # of each reference
        self._ends: dict[str, Any] = {}  # of each reference to references

    def run(self) -> None:
        self._todo.append((self.root, "#", True, 0, id(self.root)))
        while self._todo:
            self._visit(*self._todo.pop())
        for key, (node, _) in self._nodes.items():
            for name in _NAMES:
                node.pop(name, None)
            _bound(node)
            if key not in self._shared and not any(name in node for name in _IN_PLACE):
                _close(node)
        for node in self._exclusive:
            node["anyOf"] = node.pop("oneOf")

    def _visit(self, node: Any, place: str, alone: bool, depth: int, definition: int) -> None:
        if isinstance(node, bool):
            return
        if not isinstance(node, dict):
            raise ValueError(f"{place}: a schema must be an object or a boolean")
        known = self._depths.get(definition, -1)
        self._depths[definition] = max(known, depth)
        self._depth += max(0, depth - known)
        if self._depth > _MAX_DEPTH:
            raise ValueError(f"more than {_MAX_DEPTH} schemas in schemas, through all $ref")
        if not alone:
            self._shared.add(id(node))
        if (id(node), alone) in self._seen:
            return
        self._seen.add((id(node), alone))
        if id(node) not in self._nodes:
            self._nodes[id(node)] = node, place
            self._check(node, place)
            if "oneOf" in node and "anyOf" not in node and self._are_apart(node["oneOf"]):
                self._exclusive.append(node)
        for name, child, where in _children(node, place):
            self._todo.append((child, where, alone and self._leaves_alone(node, name), depth + 1, definition))
        if "$ref" in node:
            target = self.target(node["$ref"])
            self._todo.append(
                (target, node["$ref"], alone and self._leaves_alone(node, "$ref"), 0, id(target))
            )

    def _leaves_alone(self, node: dict[str, Any], name: str) -> bool:
        """Return whether the schemas under `name` are the only ones in `node` that restrict their values."""
        if name in _MAPS:
            return "patternProperties" not in node
        if name not in _IN_PLACE:
            return True
        if _ENFORCED & node.keys() != {name}:
            return False
        if name == "allOf":
            return len(node[name]) == 1
        return name != "oneOf" or self._are_apart(node[name])

    def _are_apart(self, members: list[Any]) -> bool:
        if id(members) not in self._apart:
            self._apart[id(members)] = self._compare(members)
        return self._apart[id(members)]

    def _compare(self, members: list[Any]) -> bool:
        """Return whether no value fits two of these schemas, closed or open. llguidance detects that for
        some, but does not follow references.
        """
        nodes = [self.resolve(member) for member in members]
        if len({id(node) for node in nodes}) < len(nodes):
            return False  # two are the same
        kinds = [_types(node) for node in nodes]
        objects = [node for node, kind in zip(nodes, kinds, strict=True) if kind == {"object"}]
        others = [kind for kind in kinds if kind != {"object"}] + [{"object"}] * bool(objects)
        distinct = sum(map(len, others)) == len(frozenset().union(*others))
        return all(kinds) and distinct and (len(objects) < 2 or _told_apart(objects))

    def resolve(self, node: Any) -> Any:
        """Return the schema that this one refers to, if it is nothing but a reference."""
        refs: list[str] = []
        while isinstance(node, dict) and _ENFORCED & node.keys() == {"$ref"} and len(refs) < 100:
            target = self.target(node["$ref"])
            refs.append(node["$ref"])
            node = self._ends.get(refs[-1], target)
        self._ends.update(dict.fromkeys(refs, node))
        return node

    def target(self, ref: Any) -> Any:
        if not (isinstance(ref, str) and (ref == "#" or ref.startswith("#/"))):
            raise ValueError(f"$ref {str(ref)[:100]!r}: only #/... is followed, a place in the same schema")
        if ref not in self._targets:
            self._targets[ref] = self._find(ref)
        return self._targets[ref]

    def _find(self, ref: str) -> Any:
        node: Any = self.root
        for part in unquote(ref).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and part.isascii() and part.isdigit() and int(part[:9]) < len(node):
                node = node[int(part[:9])]
            elif isinstance(node, dict) and part in node:
                node = node[part]
            else:
                raise ValueError(f"$ref {ref[:100]!r}: there is no such place in the schema")
        return node

    def _check(self, node: dict[str, Any], place: str) -> None:
        if node.get("uniqueItems") is False:
            del node["uniqueItems"]
        if unknown := sorted(_NOT_ENFORCED & node.keys()):
            raise ValueError(f"{place}: {unknown[0]} is not enforced here: leave it out")
        for name in node.keys() & _ENFORCED:
            if (problem := _problem(name, node[name])) is not None:
                raise ValueError(f"{place}: {name} {problem}")
        if "multipleOf" in node:
            self._add_multiple(node["multipleOf"], place)
        if len(node.get("properties", ())) > _MAX_PROPERTIES:
            raise ValueError(f"{place}: properties has more than {_MAX_PROPERTIES} members")
        if node.get("minProperties", 0) > max(1, len(set(node.get("required", ())))):
            raise ValueError(
                f"{place}: minProperties is not enforced above 1: name properties in required instead"
            )
        version = node.get("format")
        if _takes_strings(node) and isinstance(version, str):
            _set_format(node, version, place)

    def _add_multiple(self, value: float, place: str) -> None:
        step = Fraction(Decimal(str(value))).limit_denominator(10**15)
        if step > 0:
            both = math.lcm(self._multiples.numerator, step.numerator)
            self._multiples = Fraction(both, math.gcd(self._multiples.denominator, step.denominator))
        if step <= 0 or max(_remainders(step), _remainders(self._multiples)) > _MAX_REMAINDERS:
            raise ValueError(
                f"{place}: multipleOf is checked up to {_MAX_REMAINDERS}, as is the multiple of all there are"
            )


def _children(node: dict[str, Any], place: str) -> Iterator[tuple[str, Any, str]]:
    for name in _MAPS:
        for key, child in node.get(name, {}).items():
            yield name, child, f"{place}/{name}/{key}"
    for name in (*_LISTS, *_SINGLES):
        value = node.get(name)
        if isinstance(value, list):
            for i, child in enumerate(value):
                yield name, child, f"{place}/{name}/{i}"
        elif value is not None:
            yield name, value, f"{place}/{name}"


def _bound(node: dict[str, Any]) -> None:
    kinds = node["type"] if isinstance(node.get("type"), list) else [node.get("type")]
    if "integer" not in kinds or "number" in kinds or {"const", "enum"} & node.keys():
        return
    if not {"minimum", "exclusiveMinimum"} & node.keys():
        node["minimum"] = -_MAX_INTEGER
    if not {"maximum", "exclusiveMaximum"} & node.keys():
        node["maximum"] = _MAX_INTEGER


def _close(node: dict[str, Any]) -> None:
    if not {"type", "const", "enum"} & node.keys():
        meant = [name for name, keywords in _MEANT.items() if keywords & node.keys()]
        if len(meant) == 1:
            node["type"] = meant[0]
    properties = node.get("properties")
    says_more = {"additionalProperties", "patternProperties", "minProperties"} & node.keys()
    if properties is not None and not says_more and properties.keys() >= set(node.get("required", ())):
        node["additionalProperties"] = False
    prefix = node.get("prefixItems")
    if prefix is not None and "items" not in node and node.get("minItems", 0) <= len(prefix):
        node["items"] = False


def _types(node: Any) -> set[str]:
    """Return the types that a schema allows; empty if it does not restrict them."""
    if not isinstance(node, dict):
        return set()
    if "const" in node or isinstance(node.get("enum"), list):
        values = [node["const"]] if "const" in node else node["enum"]
        return {_JSON_TYPES[type(value)] for value in values}
    kind = node.get("type")
    kinds = [kind] if isinstance(kind, str) else list(_strings(kind))
    return {"number" if name == "integer" else name for name in kinds}


def _told_apart(nodes: list[dict[str, Any]]) -> bool:
    """Return whether a required property has a different constant in each of these objects."""
    for name in set.intersection(*(set(_strings(node.get("required"))) for node in nodes)):
        values = [_constants(node, name) for node in nodes]
        if all(values) and len(frozenset().union(*values)) == sum(map(len, values)):
            return True
    return False


def _problem(name: str, value: Any) -> str | None:
    """Return what is wrong with a keyword's value, if anything is."""
    if name in _MAPS and not isinstance(value, dict):
        return "must be an object"
    if name in _LISTS and not (isinstance(value, list) and value):
        return "must be a list with something in it"
    if name in _COUNTS and not (type(value) is int and 0 <= value <= 2**31 - 1):
        return "must be a whole number from 0 to 2147483647"
    if name in (*_BOUNDS, "multipleOf") and not (type(value) in (int, float) and abs(value) <= _MAX_NUMBER):
        return "must be a number up to 2**53"
    if name in ("pattern", "format") and not isinstance(value, str):
        return "must be a string"
    if name == "required" and not (isinstance(value, list) and len(list(_strings(value))) == len(value)):
        return "must be a list of strings"
    if name == "enum" and not (isinstance(value, list) and value):
        return "must be a list with something in it"
    if name in ("enum", "const") and any(abs(number) > _MAX_NUMBER for number in _numbers(value)):
        return "has a number beyond 2**53, which is not told from its neighbours"
    return None


def _strings(value: Any) -> Iterator[str]:
    return (item for item in value if isinstance(item, str)) if isinstance(value, list) else iter(())


def _numbers(value: Any) -> Iterator[float]:
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, list):
            todo.extend(item)
        elif isinstance(item, dict):
            todo.extend(item.values())
        elif type(item) in (int, float):
            yield item


def _constants(node: dict[str, Any], name: str) -> set[str]:
    """Return the texts that a property may be; empty if other values are possible."""
    properties = node.get("properties")
    value = properties.get(name) if isinstance(properties, dict) else None
    if not isinstance(value, dict):
        return set()
    values = [value["const"]] if "const" in value else value.get("enum")
    texts = set(_strings(values))
    return texts if values and len(texts) == len(values) else set()


def _takes_strings(node: dict[str, Any]) -> bool:
    kind = node.get("type", "string")
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


def _set_format(node: dict[str, Any], name: str, place: str) -> None:
    if name in _FORMATS:
        return
    version = name.removeprefix("uuid")
    if version not in ("1", "2", "3", "4", "5") or "allOf" in node:
        known = ", ".join(sorted(_FORMATS))
        raise ValueError(f"{place}: format {name[:50]!r} is not enforced here: use one of {known}")
    del node["format"]
    pattern = _UUID % version
    if "pattern" in node:
        node["allOf"] = [{"pattern": pattern}]
    else:
        node["pattern"] = pattern


def _remainders(step: Fraction) -> int:
    """Return the digits of the number, without its decimal point."""
    digits = Decimal(step.numerator) / Decimal(step.denominator)
    return abs(int("".join(map(str, digits.normalize().as_tuple().digits)) or "0"))


MOST_DIGITS = 20  # digits in a row: a 64-bit float has 17, a 64-bit integer 20
MOST_EXPONENT = 3


def begin_with_digit(tokens: Sequence[bytes]) -> npt.NDArray[np.bool_]:
    """Return which tokens of a vocabulary begin with a digit."""
    return np.array([token[:1].isdigit() for token in tokens], bool)


@dataclass(slots=True)
class NumberLength:
    """Follows a JSON text and tells when a number must not get another digit."""

    in_string: bool = False
    escaped: bool = False
    n_digits: int = 0  # in a row
    most: int = MOST_DIGITS

    @property
    def is_full(self) -> bool:
        return self.n_digits >= self.most

    def read(self, text: bytes) -> None:
        """Go on by some more of the text."""
        for byte in text:
            self._read(byte)

    def _read(self, byte: int) -> None:
        if self.in_string:
            self.in_string = self.escaped or byte != 0x22
            self.escaped = byte == 0x5C and not self.escaped
        elif 0x30 <= byte <= 0x39:
            self.n_digits += 1
        else:
            self.in_string = byte == 0x22
            in_exponent = byte in b"eE" or (byte in b"+-" and self.most == MOST_EXPONENT)
            self.n_digits, self.most = 0, MOST_EXPONENT if in_exponent else MOST_DIGITS
