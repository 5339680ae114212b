"""Translates GBNF, llama.cpp's grammars, to Lark, with llguidance's converter where that is exact and
bounded.
"""

from __future__ import annotations

import re

from llguidance import gbnf_to_lark as converter

_MAX_LENGTH = 1 << 15  # characters: the converter takes 60 ms for so many, and holds Python's lock
_MAX_DEPTH = 1000  # rules and groups: llguidance recurses
_MAX_WORK = 2_000_000  # characters times rules: the converter's time where each rule uses the next one
# Also matches what is not closed: a pattern that has to find the end looks for it from each beginning again.
_PARTS = re.compile(
    r'"(?:\\.|[^"\\])*(?P<quote>"?)|\[(?:\\.|[^\]\\])*(?P<bracket>\]?)|#[^\r\n]*|\.', re.DOTALL
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)


def gbnf_to_lark(text: str) -> str:
    """Translate a GBNF grammar to llguidance's Lark.

    Raises:
        ValueError: the grammar is not GBNF, has no rule `root`, or is too large.
    """
    return _as_one(convert(text))


def convert(text: str) -> str:
    """Convert the grammar rule by rule.

    Raises:
        ValueError: as `gbnf_to_lark`.
    """
    n_rules = text.count("::=")
    if len(text) > _MAX_LENGTH or n_rules + text.count("(") > _MAX_DEPTH or len(text) * n_rules > _MAX_WORK:
        raise ValueError(
            f"at most {_MAX_LENGTH} characters, {_MAX_DEPTH} rules and groups, "
            f"and {_MAX_WORK} characters times rules are taken"
        )
    try:
        return str(converter.gbnf_to_lark(_PARTS.sub(_plain, text)))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except Exception as error:  # the converter raises Exception and indexes past the end
        raise ValueError(f"not GBNF with a rule `root`: {error}") from None


def _plain(part: re.Match[str]) -> str:
    """Rewrite what the converter reads otherwise than llama.cpp: `.` is any character, \\u0041 is A."""
    text = part[0]
    if text == ".":
        return "[\\x00-\U0010ffff]"
    if "" in (part["quote"], part["bracket"]):
        raise ValueError(f"the {text[0]} that is character {part.start() + 1} is not closed")
    return "" if text.startswith("#") else _ESCAPE.sub(_character, text)


def _character(escape: re.Match[str]) -> str:
    if escape[4]:
        return escape[0]
    code = int(escape[1] or escape[2] or escape[3], 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise ValueError(f"{escape[0]} is not a character")
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _as_one(lark: str) -> str:
    """Convert a grammar without recursion to one lexeme. llguidance's lexer is greedy: of `[a-z]+ "b"` in two
    lexemes the first would take every b.
    """
    names = re.findall(r"^(\w+):", lark, re.MULTILINE)
    recursive = any(name != "start" and not name.isupper() for name in names)
    if recursive or len(re.findall(r"\bstart\b", lark)) != 1:
        return lark
    return re.sub(r"^start:", "start: WHOLE_ANSWER\nWHOLE_ANSWER:", lark, count=1, flags=re.MULTILINE)
