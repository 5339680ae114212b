"""The process of `BodyReader`: parses bodies from its input until that ends."""

from __future__ import annotations

import enum
import json
import os
import pickle
import re
import sys
from typing import Any, TypeAlias

from pydantic import BaseModel, ValidationError

from mixedkv.server.unknown_fields import read_tolerantly, without_effect

_MAX_PARTS = 250_000  # objects and arrays, of 60 to 240 bytes; 100,000 messages of one part are 200,000
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NICENESS = 10  # tokens come first


class Kind(enum.Enum):
    """The kinds of results of parsing a body."""

    READ = enum.auto()  # an object of its model, names of unknown fields, and of known ones without effect
    WRONG = enum.auto()  # pydantic's first error
    REFUSED = enum.auto()  # why


Result: TypeAlias = tuple[Kind, Any]


def read(model: type[BaseModel], body: bytes, strict: bool) -> Result:
    """Parse a body. If `strict`, unknown fields are errors."""
    if _n_parts(body) > _MAX_PARTS and _n_parts(_STRING.sub(b"", body)) > _MAX_PARTS:
        return Kind.REFUSED, f"the body has more than {_MAX_PARTS} objects and lists: send less"
    try:
        value = json.loads(body)
        found, unknown = (model.model_validate(value), []) if strict else read_tolerantly(model, value)
        return Kind.READ, (found, unknown, without_effect(found))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return Kind.WRONG, first
    except ValueError as error:
        return Kind.WRONG, {"type": "json_invalid", "loc": (), "msg": str(error)}
    except (RecursionError, MemoryError):
        return Kind.REFUSED, "the body is nested too deep, or too large: send less"


def _n_parts(body: bytes) -> int:
    return body.count(b"{") + body.count(b"[")


def main() -> None:
    os.nice(_NICENESS)
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may write to the pipe
    while True:
        try:
            model, body, strict = pickle.load(source)
        except EOFError:
            return
        kind, result = read(model, body, strict)
        pickle.dump((kind, result), sink, pickle.HIGHEST_PROTOCOL)
        sink.flush()
