"""Ids that come from outside, of sessions and messages. Checked before anything else sees them."""

from __future__ import annotations

import re
import secrets

MAX_LENGTH = 256
_SHOWN = 40  # characters of a refused value that its error message repeats
PATTERN = r"[A-Za-z0-9_][A-Za-z0-9_.:@~+=-]*"
_RANDOM_BYTES = 24


def check_id(field: str, value: object) -> str:
    """The value itself if it can stand in a key, a file name, a URL and a log line.

    1 to 256 letters A-Z and a-z, digits and `_ . : @ ~ + = -`, of which the first is a letter, digit or `_`.

    Raises:
        ValueError: it cannot; the message names the field and what is allowed.
    """
    if not isinstance(value, str):
        raise ValueError(f"{field} is of type {type(value).__name__}: use a string")
    if not 1 <= len(value) <= MAX_LENGTH:
        raise ValueError(f"{field} has {len(value)} characters: use 1 to {MAX_LENGTH}")
    if not re.fullmatch(PATTERN, value, re.ASCII):
        raise ValueError(
            f"{field}={_shown(value)} is refused: use 1 to {MAX_LENGTH} of A-Z a-z 0-9 _ . : @ ~ + = - "
            f"and start with a letter, a digit or _"
        )
    return value


def new_id(kind: str) -> str:
    """An id that cannot be guessed: 192 random bits after what it names, e.g. "session-..."."""
    return f"{kind}-{secrets.token_urlsafe(_RANDOM_BYTES)}"


def _shown(value: str) -> str:
    return ascii(value if len(value) <= _SHOWN else value[:_SHOWN] + "...")
