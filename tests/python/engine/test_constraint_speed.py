"""How long constraints take with a vocabulary of 150,000 tokens: pytest -m bench -s, prints a table."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import numpy as np
import pytest

from mixedkv.constrain.constraint import ConstraintCompiler
from mixedkv.constrain.constraint_text import Constraint
from mixedkv.errors import DeadEndError
from support.engine.constraints import BYTEWISE

pytestmark = pytest.mark.full

_N_TOKENS = 150_000
_OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}},
    },
    "required": ["name", "age"],
}
_CASES: dict[str, tuple[Any, Any]] = {
    "an object of three": ("json_schema", _OBJECT),
    "any object": ("json_schema", {"type": "object"}),
    "(a?){40}a{40}": ("json_schema", {"pattern": "^(a?){40}a{40}$"}),
    "(a|a)*": ("json_schema", {"pattern": "^(a|a)*$"}),
    "(a{900}){900}": ("json_schema", {"pattern": "^(a{900}){900}$"}),
    "[a-z].{100}": ("json_schema", {"pattern": "[a-z].{100}$"}),
    ".*foo": ("json_schema", {"pattern": ".*foo"}),
    "letters, 50 x 50": ("json_schema", {"pattern": "^([\\p{L}\\p{N}]{1,50}[^a]{1,50}){50}$"}),
    "refers to itself": ("json_schema", {"properties": {"a": {"$ref": "#"}, "b": {"type": "string"}}}),
    "450 properties": ("json_schema", {"properties": {f"property_{i}": {} for i in range(450)}}),
    "6000 words": ("json_schema", {"enum": [f"x{i}" for i in range(6000)]}),
    "one of 60,000 letters": ("json_schema", {"enum": ["x" * 60_000]}),
    "maxLength 10**9": ("json_schema", {"type": "string", "maxLength": 10**9}),
    "multipleOf 9973": ("json_schema", {"type": "integer", "multipleOf": 9973}),
    "root ::= root root": ("gbnf", 'root ::= root root | root root root | "a" | "b" | ""'),
    "a{0,100000}": ("gbnf", 'root ::= a{0,100000}\na ::= b | "c" | ""\nb ::= "a" a'),
}


def _tokens() -> list[bytes]:
    """Bytes, words with and without a space before them, punctuation, characters of three alphabets, bits of
    characters.
    """
    rng = random.Random(0)
    tokens = dict.fromkeys(BYTEWISE[0][:256])
    while len(tokens) < _N_TOKENS - 2:
        kind = rng.random()
        if kind < 0.75:
            word = "".join(rng.choices("etaoinshrdlucmfwypvbgkjqxz", k=rng.randint(1, 9)))
            token = (" " * (rng.random() < 0.5) + word).encode()
        elif kind < 0.85:
            token = "".join(rng.choices("{}[]\":,.0123456789\n ()<>=_-/\\'", k=rng.randint(1, 4))).encode()
        elif kind < 0.95:
            first = rng.choice((0xA0, 0x3040, 0x4E00))
            token = "".join(chr(first + rng.randrange(0x400)) for _ in range(rng.randint(1, 3))).encode()
        else:
            token = bytes(rng.choices(range(128, 256), k=rng.randint(2, 4)))
        tokens[token] = None
    return [*tokens, b"\xff<end>", b"\xff<turn>"]


@pytest.fixture(scope="module")
def large() -> ConstraintCompiler:
    tokens = _tokens()
    began = time.perf_counter()
    compiler = ConstraintCompiler.of_tokens(tokens, [_N_TOKENS - 2, _N_TOKENS - 1])
    print(f"\n{len(tokens)} tokens: made in {time.perf_counter() - began:.2f} s\n")
    print("| | compile ms | tokens | allows ms, max | allowed ms, p50 | max | accept ms, max | then |")
    print("|---|---|---|---|---|---|---|---|")
    return compiler


def _timed(times: list[float], function: Any, *args: Any) -> Any:
    began = time.perf_counter()
    try:
        return function(*args)
    finally:
        times.append(1e3 * (time.perf_counter() - began))


@pytest.mark.bench
@pytest.mark.parametrize("name", list(_CASES))
def test_no_step_takes_long(large: ConstraintCompiler, name: str) -> None:
    kind, text = _CASES[name]
    text = text if isinstance(text, str) else json.dumps(text)
    compiling: list[float] = []
    try:
        matcher = _timed(compiling, large.compile, Constraint(kind, text))
    except ValueError as error:
        print(f"| `{name}` | {compiling[0]:.1f} | | | | | | {str(error).partition('(')[2][:40]} |")
        return
    one: list[float] = [0.0]
    every: list[float] = [0.0]
    accepting: list[float] = [0.0]
    rng, end = np.random.default_rng(0), "goes on"
    try:
        for _ in range(300):
            _timed(one, matcher.allows, int(rng.integers(_N_TOKENS)))
            allowed = _timed(every, matcher.allowed)
            others = allowed[allowed < _N_TOKENS - 2]
            token = int(rng.choice(others if len(others) else allowed))
            _timed(accepting, matcher.accept, token)
            if not len(others):
                end = "complete"
                break
    except DeadEndError as error:
        end = str(error).partition("(")[2][:40] or "dead end"
    print(
        f"| `{name}` | {compiling[0]:.1f} | {len(accepting) - 1} | {max(one):.2f} | {np.median(every):.2f} | "
        f"{max(every):.1f} | {max(accepting):.2f} | {end} |"
    )
    assert max(max(one), max(every), max(accepting)) < 100
