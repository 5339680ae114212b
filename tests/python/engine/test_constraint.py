"""Schemas, regular expressions and grammars: what is allowed is what they say, and nothing takes long."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.constrain.constraint import ConstraintCompiler
from mixedkv.constrain.constraint_text import Constraint
from mixedkv.constrain.gbnf import gbnf_to_lark
from mixedkv.constrain.json_schema import MOST_DIGITS
from mixedkv.errors import DeadEndError
from mixedkv.native.detokenizer import Detokenizer
from support.engine.constraints import BYTEWISE, follow, random_answer, schemas
from support.models import zoo

pytestmark = pytest.mark.full

END, TURN = BYTEWISE[1]


@pytest.fixture(scope="module")
def bytewise() -> ConstraintCompiler:
    return ConstraintCompiler.of_tokens(*BYTEWISE)


@pytest.fixture(scope="module")
def bundled() -> Iterator[tuple[ConstraintCompiler, list[bytes], list[int]]]:
    """The bundled model's vocabulary."""
    with Llama(model_path(), n_ctx=128, verbose=False) as llm:
        compiler = ConstraintCompiler(llm._model.vocab)
        pieces = Detokenizer(llm._model.vocab)
        yield compiler, [pieces[token] for token in range(pieces.n_vocab)], compiler.ends


def schema_of(schema: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(schema), "schema")


def takes(compiler: ConstraintCompiler, schema: Any, value: Any) -> bool:
    return follow(compiler.compile(schema_of(schema)), json.dumps(value, ensure_ascii=False))


# --- what may come next ---


def tokens_of(mask: Any) -> set[int]:
    return {32 * word + bit for word in range(len(mask)) for bit in range(32) if mask[word] >> bit & 1}


def test_what_may_come_behind_drafts(bytewise: ConstraintCompiler) -> None:
    """Up to the first that is refused; the matcher stays where it is."""
    matcher = bytewise.compile(Constraint("regex", "(ab|cd)e"))
    a, b, c, e = b"abce"
    assert tokens_of(matcher.ahead([])) == {a, c} == set(matcher.allowed().tolist())
    assert tokens_of(matcher.ahead([a])) == {a, b, c}
    assert tokens_of(matcher.ahead([a, b, e])) == {a, b, c, e, END, TURN}
    assert tokens_of(matcher.ahead([a, c, e])) == {a, b, c}
    assert tokens_of(matcher.ahead([b, e])) == {a, c}
    assert matcher.allows(c)


def test_a_number_that_is_full_gets_no_further_digit(bytewise: ConstraintCompiler) -> None:
    matcher = bytewise.compile(schema_of({"type": "number"}))
    for digit in b"1" * MOST_DIGITS:
        assert matcher.allows(digit)
        matcher.accept(digit)
    assert set(matcher.allowed().tolist()) == tokens_of(matcher.ahead([]))
    assert not matcher.allows(ord("1"))


def test_masks_that_take_too_long_are_not_made(
    bytewise: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mixedkv.constrain.constraint._MASK_SECONDS", -0.005)
    matcher = bytewise.compile(Constraint("regex", "a*"))
    found = [matcher.ahead([]) is not None for _ in range(10)]
    assert found == sorted(found, reverse=True)
    assert found[0]
    assert not found[-1]
    assert matcher.allows(ord("a"))


# --- every keyword is enforced or refused ---

ENFORCED: list[tuple[dict[str, Any], Any, Any]] = [  # schema, what it takes, what it does not take
    ({"type": "integer", "minimum": 3}, 3, 2),
    ({"type": "integer", "maximum": 3}, 3, 4),
    ({"type": "number", "exclusiveMinimum": 1.5}, 1.75, 1.5),
    ({"type": "number", "exclusiveMaximum": 1.5}, 1.25, 1.5),
    ({"type": "integer", "multipleOf": 7}, 21, 22),
    ({"type": "number", "multipleOf": 0.01}, 0.25, 0.255),
    ({"type": ["integer", "null"]}, None, "a"),
    ({"enum": [1, "a", {"b": None}]}, {"b": None}, {"b": 1}),
    ({"const": [1, "a"]}, [1, "a"], [1]),
    ({"type": "string", "minLength": 2}, "éé", "é"),
    ({"type": "string", "maxLength": 2}, "\n\U0001f600", "abc"),
    ({"type": "string", "pattern": "b"}, "abc", "ac"),
    ({"type": "string", "format": "date"}, "2024-02-29", "2024-02-30"),
    ({"type": "string", "format": "uuid4"}, "0" * 8 + "-0000-4000-8000-" + "0" * 12, "0" * 36),
    ({"type": "string", "format": "ipv4"}, "1.2.3.4", "1.2.3.400"),
    ({"type": "array", "items": {"type": "integer"}}, [1, 2], [1, "a"]),
    ({"type": "array", "minItems": 1}, [1], []),
    ({"type": "array", "maxItems": 1}, [1], [1, 2]),
    ({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}]}, [1, 2], [2]),
    ({"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "null"}}, [1, None], [1, 1]),
    ({"type": "array", "items": [{"const": 1}], "additionalItems": False}, [1], [1, 1]),
    ({"type": "object", "properties": {"a": {"type": "integer"}}}, {"a": 1}, {"a": "x"}),
    ({"type": "object", "required": ["z"]}, {"z": 1}, {}),
    ({"properties": {"a": {}}, "required": ["a", "z"]}, {"a": 1, "z": 2}, {"a": 1}),
    ({"type": "object", "additionalProperties": {"type": "null"}}, {"a": None}, {"a": 1}),
    ({"type": "object", "patternProperties": {"^a": {"type": "null"}}}, {"ab": None, "b": 1}, {"ab": 1}),
    ({"type": "object", "minProperties": 1}, {"a": 1}, {}),
    ({"type": "object", "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 1}),
    ({"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 3}]}, 3, 2),
    ({"oneOf": [{"type": "null"}, {"type": "integer"}]}, None, "a"),
    ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {"const": 1}}}]}, {"a": 0, "b": 1}, {"b": 2}),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"const": 1}}}, 1, 2),
    (
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"next": {"next": {}}},
        {"next": {"next": 1}},
    ),
    ({"properties": {"not": {"const": {"uniqueItems": 1}}}}, {"not": {"uniqueItems": 1}}, {"not": 1}),
]


@pytest.mark.parametrize(("schema", "good", "bad"), ENFORCED)
def test_a_keyword_is_enforced(bytewise: ConstraintCompiler, schema: Any, good: Any, bad: Any) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    if "format" not in schema and not isinstance(schema.get("items"), list):
        assert validator.is_valid(good)
        assert not validator.is_valid(bad)
    assert takes(bytewise, schema, good)
    assert not takes(bytewise, schema, bad)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {"const": 1}}, "#: not"),
        ({"if": {"const": 1}, "then": False}, "#: if"),
        ({"items": {"then": False}}, "#/items: then"),
        ({"properties": {"a": {"uniqueItems": True}}}, "#/properties/a: uniqueItems"),
        ({"anyOf": [{}, {"contains": {}}]}, "#/anyOf/1: contains"),
        ({"prefixItems": [{"minContains": 1}]}, "#/prefixItems/0: minContains"),
        ({"patternProperties": {"a": {"dependentRequired": {}}}}, "#/patternProperties/a: dependentRequired"),
        ({"additionalProperties": {"dependentSchemas": {}}}, "#/additionalProperties: dependentSchemas"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"dependencies": {}}}}, "#/\\$defs/a: dependencies"),
        ({"allOf": [{"propertyNames": {}}]}, "#/allOf/0: propertyNames"),
        ({"unevaluatedProperties": False}, "#: unevaluatedProperties"),
        ({"unevaluatedItems": False}, "#: unevaluatedItems"),
        ({"$dynamicRef": "#a"}, "#: \\$dynamicRef"),
        ({"x-guidance": {"lenient": True}}, "#: x-guidance"),
        ({"type": "string", "format": "regex"}, "#: format 'regex'"),
        ({"properties": {"a": {}}, "minProperties": 2}, "#: minProperties"),
        ({"properties": {"a": {}, "b": {}}, "required": ["a"], "maxProperties": 1}, "maxProperties"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"minItems": 3, "maxItems": 2}, "minItems"),
        ({"minLength": 3, "maxLength": 2}, "minLength"),
        ({"minimum": 3, "maximum": 2}, "minimum"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "required property 'a'"),
        ({"const": 2**53 + 1}, "#: const"),
        ({"enum": [[2**60]]}, "#: enum"),
        ({"maximum": 10**30}, "#: maximum"),
        ({"exclusiveMinimum": True, "minimum": 1}, "#: exclusiveMinimum"),
        ({"multipleOf": 0}, "#: multipleOf"),
        ({"multipleOf": 1234567}, "#: multipleOf"),  # compiles for ten seconds
        ({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}, "multipleOf"),
        ({"$ref": "https://example.org/schema.json"}, "\\$ref 'https"),
        ({"$ref": "#anchor", "$defs": {"a": {"$anchor": "anchor"}}}, "\\$ref '#anchor'"),
        ({"$ref": "#/definitions/none"}, "\\$ref '#/definitions/none'"),
        ({"type": "oddity"}, "oddity"),
        ({"type": []}, "anyOf is empty"),
        ({"enum": []}, "#: enum"),
        ({"anyOf": []}, "#: anyOf"),
        ({"oneOf": {}}, "#: oneOf"),
        ({"properties": 5}, "#: properties"),
        ({"items": 5}, "#/items"),
        ({"required": ["a", 1]}, "#: required"),
        ({"minLength": "é" * 200}, "#: minLength"),
        ({"type": "string", "pattern": "("}, "schema"),
        ({"type": "string", "pattern": "^(?=a)b$"}, "schema"),
        ({"type": "string", "pattern": "^(a)\\1$"}, "schema"),
        ({"type": "string", "pattern": "^\\bx$"}, "schema"),
        ({"type": "string", "pattern": "\\ud800"}, "schema"),
        ({"type": "string", "pattern": "\ud800"}, "surrogate"),
        ({"enum": ["\ud800"]}, "surrogate"),
        ({"const": float("nan")}, "NaN"),
        ({"enum": ["x" * 100_000]}, "at most 65536"),
        ({"$ref": "#"}, "schema: no token"),
    ],
)
def test_what_is_not_enforced_is_named(bytewise: ConstraintCompiler, schema: Any, named: str) -> None:
    with pytest.raises(ValueError, match=f"^schema: .*{named}" if not named.startswith("schema") else named):
        bytewise.compile(schema_of(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {
            "title": "t",
            "description": "d",
            "default": {"not": 1},
            "examples": [{"if": 1}],
            "deprecated": True,
        },
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "$id": "urn:x",
            "$comment": "c",
            "$anchor": "a",
        },
        {"readOnly": True, "writeOnly": False, "discriminator": {"propertyName": "a"}, "x-mine": 1},
        {"contentEncoding": "base64", "contentMediaType": "text/plain", "nullable": True},
        {"type": "integer", "format": "int32", "uniqueItems": False},
        {"$defs": {"unused": {"not": {}}}, "definitions": {"unused": {"if": {}}}},
    ],
)
def test_annotations_pass(bytewise: ConstraintCompiler, schema: Any) -> None:
    assert takes(bytewise, schema, 1)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"properties": {"a": {}}}, {"a": 1, "b": 1}),
        ({"properties": {"a": {}}}, "not an object"),
        ({"anyOf": [{"properties": {"a": {}}}, {"type": "null"}]}, {"b": 1}),
        ({"$ref": "#/$defs/a", "title": "t", "$defs": {"a": {"properties": {"a": {}}}}}, {"b": 1}),
        ({"prefixItems": [{}]}, [1, 2]),
        ({"items": {}}, 1),
        ({"pattern": "a"}, 1),
        (
            {
                "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
                "$defs": {
                    "a": {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]},
                    "b": {
                        "type": "object",
                        "properties": {"kind": {"enum": ["b", "c"]}},
                        "required": ["kind"],
                    },
                },
            },
            {"kind": "c", "other": 1},
        ),
    ],
)
def test_what_a_schema_merely_leaves_open_is_closed(
    bytewise: ConstraintCompiler, schema: Any, value: Any
) -> None:
    assert jsonschema.Draft202012Validator(schema).is_valid(value)
    assert not takes(bytewise, schema, value)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"properties": {"a": {}}, "additionalProperties": True}, {"a": 1, "b": 1}),
        ({"properties": {"a": {}}, "required": ["b"]}, {"b": 1}),
        ({"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]}, {"a": 1, "b": 1}),
        ({"properties": {"a": {}}, "$ref": "#/$defs/b", "$defs": {"b": {"required": ["b"]}}}, {"b": 1}),
        ({"prefixItems": [{}], "minItems": 2}, [1, 2]),
        ({}, "anything"),
    ],
)
def test_what_could_exclude_each_other_stays_open(
    bytewise: ConstraintCompiler, schema: Any, value: Any
) -> None:
    assert takes(bytewise, schema, value)


# --- all texts that are allowed fit the schema ---

_FORMS = {
    "date": r"\d{4}-\d\d-\d\d",
    "time": r"\d\d:\d\d:\d\d(\.\d+)?([zZ]|[+-]\d\d:\d\d)",
    "date-time": r"\d{4}-\d\d-\d\d[tT ]\d\d:\d\d:\d\d(\.\d+)?([zZ]|[+-]\d\d:\d\d)",
    "uuid": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "uuid4": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}",
}
FORMATS = jsonschema.FormatChecker(formats=[])
for _name, _form in _FORMS.items():
    FORMATS.checks(_name)(
        lambda value, form=_form: not isinstance(value, str) or re.fullmatch(form, value, re.I) is not None
    )


def check_an_answer(bundled: Any, schema: Any, seed: int) -> None:
    compiler, tokens, ends = bundled
    text = random_answer(compiler.compile(schema_of(schema)), tokens, ends, seed)
    assume(text is not None)
    assert text is not None
    value = json.loads(text.decode("utf-8"))
    jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(value)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schemas(), st.integers(0, 2**32))
def test_random_answers_fit_random_schemas(bundled: Any, schema: Any, seed: int) -> None:
    check_an_answer(bundled, schema, seed)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schemas(), st.integers(0, 2**32))
def test_two_thousand_random_answers_fit_random_schemas(bundled: Any, schema: Any, seed: int) -> None:
    check_an_answer(bundled, schema, seed)


# --- regular expressions and grammars ---


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("regex", "a/b\n[0-9]+", "a/b\n12", "a/b 1"),
        ("regex", r"a\\/|x", r"a\/", "a/"),
        ("regex", "(a|b)*c", "abc", "ab"),
        ("gbnf", 'root ::= "ab"', "ab", "a"),
        ("gbnf", 'root ::= [a-z]+ "b"', "aab", "aa"),
        ("gbnf", 'root ::= "(" root ")" | x # root\nx ::= [^"\\]/()]+', "((a.b))", "((a)"),
        ("gbnf", r'root ::= "\u0041\U0001F600\u00e9\\" [\u0041-\u005a].', "A\U0001f600é\\Z\n", "AZ"),
        ("gbnf", 'root ::= "a.b/./c" "x"{2,3}', "a.b/./cxx", "a.b/./cx"),
        ("gbnf", 'root ::= root "a" | "b"', "baa", "a"),
        ("lark", 'start: "a" b\nb: "b" | "c"', "ac", "a"),
    ],
)
def test_a_grammar_is_followed(
    bytewise: ConstraintCompiler, kind: Any, text: str, good: str, bad: str
) -> None:
    assert follow(bytewise.compile(Constraint(kind, text)), good)
    assert not follow(bytewise.compile(Constraint(kind, text)), bad)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "("),
        ("regex", "a" * 100_000),
        ("regex", "(?=a)b"),
        ("gbnf", "root ::= ("),
        ("gbnf", 'root ::= root "a"'),
        ("gbnf", "root ::= " + "(" * 5000),
        ("gbnf", "root ::= " + "(" * 900),
        ("gbnf", 'root ::= "a"{5,2}'),
        ("gbnf", 'root ::= "a'),
        ("gbnf", 'root ::= "\\'),
        ("gbnf", 'root ::= "\\ud800"'),
        ("gbnf", 'root ::= "a" | b'),
        ("gbnf", 'x ::= "a"'),
        ("gbnf", ""),
        ("gbnf", 'root ::= "' + "a" * 40_000 + '"'),
        ("gbnf", "root ::= a0\n" + "\n".join(f"a{i} ::= a{i + 1}" for i in range(600)) + '\na600 ::= "a"'),
        ("lark", "start: ("),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_an_error(
    bytewise: ConstraintCompiler, kind: Any, text: str
) -> None:
    with pytest.raises(ValueError, match=r"^here: "):
        bytewise.compile(Constraint(kind, text, "here"))


# --- tokens ---


def test_tokens_of_a_model_are_the_bytes_of_its_answers(
    bundled: tuple[ConstraintCompiler, list[bytes], list[int]],
) -> None:
    compiler, tokens, ends = bundled
    matcher = compiler.compile(Constraint("regex", "(?s:.*)"))
    allowed = set(matcher.allowed().tolist())
    for token, text in enumerate(tokens):
        begins_a_character = text[:1] and not 0x80 <= text[0] < 0xC2 and text[0] < 0xF5
        assert (token in allowed) == (bool(begins_a_character) or token in ends), text


@pytest.mark.parametrize(
    ("kind", "tokens", "text", "allowed"),
    [
        ("llama", ["\u2581", "\u2581the", "the", "<0x20>", "<0x07>"], "( the|\x07).*", [0, 1, 3, 4]),
        ("gpt2", ["\u0120", "\u0120the", "the", "\u0107", "\u00c3"], "( the|\x07|\u00e9).*", [0, 1, 3, 4]),
        ("bert", ["\u2581the", "the", "\u2581", "in", "\u2581in"], "( the|in).*", [0, 2, 3]),
    ],
)
def test_every_kind_of_vocabulary_has_bytes(
    tmp_path: Path, kind: str, tokens: list[str], text: str, allowed: list[int]
) -> None:
    """ "\u2581" is a space to SentencePiece, "\u0120" in GPT-2's letters for bytes; <0x07> is a byte."""
    path = zoo.write_vocabulary(tmp_path / "vocabulary.gguf", kind, tokens)
    llm = Llama(path, vocab_only=True, verbose=False)
    try:
        compiler = ConstraintCompiler(llm._model.vocab)
        assert compiler.compile(Constraint("regex", text)).allowed().tolist() == allowed
    finally:
        llm.close()


def test_the_end_may_come_when_the_answer_is_complete(bytewise: ConstraintCompiler) -> None:
    matcher = bytewise.compile(Constraint("regex", "ab*"))
    assert not matcher.allows(END)
    matcher.accept(ord("a"))
    assert matcher.allows(END)
    assert matcher.allows(TURN)
    assert matcher.allowed().tolist() == [ord("b"), END, TURN]
    matcher.accept(TURN)
    assert matcher.allowed().tolist() == [END, TURN]  # with ignore_eos it goes on like this
    matcher.accept(END)
    assert matcher.allowed().tolist() == [END, TURN]


def test_only_the_end_may_come_when_nothing_else_may(bytewise: ConstraintCompiler) -> None:
    matcher = bytewise.compile(Constraint("regex", "a"))
    matcher.accept(ord("a"))
    assert not matcher.allows(ord("a"))
    assert matcher.allowed().tolist() == [END, TURN]


def test_copies_go_their_own_ways(bytewise: ConstraintCompiler) -> None:
    first = bytewise.compile(Constraint("regex", "ab|cd"))
    second = first.copy()
    first.accept(ord("a"))
    second.accept(ord("c"))
    assert (first.allowed().tolist(), second.allowed().tolist()) == ([ord("b")], [ord("d")])


def test_a_vocabulary_without_the_next_byte_is_a_dead_end() -> None:
    compiler = ConstraintCompiler.of_tokens([b"a", b"\xff<end>"], [1])
    with pytest.raises(DeadEndError, match=r"^grammar: no token"):
        compiler.compile(Constraint("regex", "b"))
    matcher = compiler.compile(Constraint("regex", "ab"))
    matcher.accept(0)
    assert not matcher.allows(0)
    with pytest.raises(DeadEndError, match=r"^grammar: no token"):
        matcher.allowed()


def test_a_vocabulary_without_an_end_takes_no_constraint() -> None:
    with pytest.raises(ValueError, match=r"^grammar: .* ends"):
        ConstraintCompiler.of_tokens([b"a"], []).compile(Constraint("regex", "a"))


@pytest.mark.parametrize("open_", ["[", '"' + '\\"' * 3, "[\\]"])
def test_what_is_not_closed_is_named_at_once(open_: str) -> None:
    """A pattern looked for the end from each of them again, for half a minute."""
    began = time.thread_time()
    with pytest.raises(ValueError, match=r"the .* that is character \d+ is not closed"):
        gbnf_to_lark("root ::= " + open_ * (32_000 // len(open_)))
    assert time.thread_time() - began < 0.5
