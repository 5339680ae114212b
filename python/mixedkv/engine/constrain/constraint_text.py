"""Constraints of answers as text: plain data, which `constraint` compiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["json_schema", "regex", "gbnf", "lark", "calls"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """Constraint on the text of an answer.

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
