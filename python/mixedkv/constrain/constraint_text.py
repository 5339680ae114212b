"""The text of a constraint: plain data, which `constraint` compiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["json_schema", "regex", "gbnf", "lark", "calls"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """Constraint on the text of an answer.

    Attributes:
        kind: the language of `text`. Lark is only for trusted authors, as it can compile for hours. The
            grammar of calls is Lark made by this package, with schemas in it.
        name: what error messages call it.
        shown: control tokens that stand for their text in it.
    """

    kind: Kind
    text: str
    name: str = "grammar"
    shown: tuple[str, ...] = ()
