"""What an answer must be, as a text in a language for that: plain data, which `constraint` compiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["json_schema", "regex", "gbnf", "lark", "calls"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must be.

    Attributes:
        kind: the language of `text`. Lark is for authors that are trusted: it can compile for hours. Calls
            are Lark of ours, with schemas in it.
        name: what error messages call it.
        shown: control tokens that stand for their text in it.
    """

    kind: Kind
    text: str
    name: str = "grammar"
    shown: tuple[str, ...] = ()
