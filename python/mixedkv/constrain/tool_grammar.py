"""Makes the grammar of tool calls for llguidance: the form from llama.cpp, the arguments from their schemas.

llama.cpp has a GBNF grammar of calls and arguments. Here, an argument object in JSON becomes llguidance's own
JSON, so that a schema means the same as in `response_format`. A text up to its closing tag becomes one
lexeme, which in GBNF is a rule per character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from mixedkv.constrain.gbnf import convert
from mixedkv.constrain.json_schema import MOST_DIGITS, MOST_EXPONENT, closed_schema

_RULE = re.compile(r"^([\w-]+) ::= (.*)$", re.MULTILINE)
_PARTS = re.compile(r'"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?|[A-Za-z][\w-]*')
_CLOSED_TEXT = re.compile(r"ac-(\d+)")  # the number is that of the parser's node
_SEVERAL = re.compile(r"\(tool-call\?? space\)\+")  # with ? where a call is the model's choice
# A call's id may be a number, in which a model that repeats itself would write digits without end.
_NUMBER = (
    f'"-"? ("0" | [1-9] [0-9]{{0,{MOST_DIGITS - 1}}}) ("." [0-9]{{1,{MOST_DIGITS}}})? '
    f"([eE] [+-]? [0-9]{{1,{MOST_EXPONENT}}})?"
)
_OTHER = re.compile(r"[^a-zA-Z0-9-]+")  # what llama.cpp makes a hyphen in a rule's name


def tool_grammar(
    gbnf: str,
    parser: str,
    schemas: Mapping[str, dict[str, Any]],
    *,
    space: str,
    first: str = "",
    parallel: bool = True,
) -> str:
    """Return the Lark grammar of an answer that consists of calls only.

    Args:
        gbnf: llama.cpp's grammar of an answer that must have a call.
        parser: llama.cpp's parser of that answer, as JSON.
        schemas: the schema of each tool's arguments.
        space: the pattern of white space in JSON.
        first: text before the calls.
        parallel: more than one call. llama.cpp has them in any case where each has tags of its own.

    Raises:
        ValueError: the grammar has no call, a schema cannot be followed, or the result is too large.
    """
    rules = dict(_RULE.findall(gbnf))
    if "json-number" in rules:
        rules["json-number"] = _NUMBER
    calls = [name for name in _names(rules.get("root", "")) if "tool" in name]
    if not calls:
        raise ValueError("llama.cpp has no grammar of this model's tool calls")
    rules["root"] = f"{json.dumps(first, ensure_ascii=False)} {calls[-1]}" if first else calls[-1]
    if not parallel and _SEVERAL.fullmatch(rules.get("tool-calls", "")):
        rules["tool-calls"] = "tool-call"
    given = {**_closed_texts(rules, parser), **_objects(rules, schemas, space)}
    for name in given:  # a rule that refers to itself, as the converter would merge another one into a lexeme
        rules[name] = f'"x" | "x" {name}'
    used = _reached(rules)
    # the converter knows no capitals, and Lark's first rule is `start`, a name that some families have
    short = {name: name if name == "root" else f"rule-{i}" for i, name in enumerate(used)}
    try:
        lark = convert("\n".join(f"{short[name]} ::= {_renamed(rules[name], short)}" for name in used))
    except ValueError as error:
        raise ValueError(
            f"a call of so many cannot be forced ({error}): name it in tool_choice, or give fewer"
        ) from None
    for name in used:  # as one lexeme `<parameter=limit>5` would take the beginning of `<parameter=text>` too
        if name.startswith("tool") and "schema" not in name:
            lexeme = short[name].replace("-", "_").upper()
            lark = re.sub(rf"\b{lexeme}\b", lexeme.lower(), lark)
    for name in given.keys() & set(used):
        lark = _replace(lark, short[name].replace("-", "_"), given[name])
    return lark


def _names(body: str) -> list[str]:
    """Return the names of the rules that a rule refers to."""
    return [part for part in _PARTS.findall(body) if part[0] not in '"[']


def _reached(rules: Mapping[str, str]) -> list[str]:
    found, todo = ["root"], ["root"]
    while todo:
        for name in _names(rules[todo.pop()]):
            if name in rules and name not in found:
                found.append(name)
                todo.append(name)
    return found


def _renamed(body: str, names: Mapping[str, str]) -> str:
    return _PARTS.sub(lambda part: names.get(part[0], part[0]), body)


def _closed_texts(rules: Mapping[str, str], parser: str) -> dict[str, str]:
    """Return the rules for texts up to a closing tag, including the tag."""
    nodes, out = json.loads(parser)["parsers"], {}
    for name in rules:
        if found := _CLOSED_TEXT.fullmatch(name):
            ends = "|".join(_pattern(end) for end in nodes[int(found[1])]["delimiters"])
            out[name] = f"[lazy]: /(?s:.)*({ends})/"
    return out


def _pattern(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9]", lambda c: f"\\x{{{ord(c[0]):x}}}", text)


def _objects(rules: Mapping[str, str], schemas: Mapping[str, dict[str, Any]], space: str) -> dict[str, str]:
    """Return the rules for arguments that are one JSON object."""
    names = {tool: f"tool-{_OTHER.sub('-', tool)}-schema" for tool in schemas}
    if len(set(names.values())) < len(names) or any("schema" in tool for tool in schemas):
        return {}  # llama.cpp tells such rules apart by numbers: its own will do
    out = {}
    for tool, name in names.items():
        if name in rules:
            try:
                schema = {**closed_schema(schemas[tool]), "x-guidance": {"whitespace_pattern": space}}
            except ValueError as error:
                raise ValueError(f"the parameters of {tool}: {error}") from None
            out[name] = f": %json {json.dumps(schema)}"
    return out


def _replace(lark: str, rule: str, body: str) -> str:
    """Replace the body of a rule, including its indented lines."""
    return re.sub(rf"^{rule}:.*\n?(?:[ \t]+.*\n?)*", lambda _: f"{rule}{body}\n", lark, flags=re.MULTILINE)
