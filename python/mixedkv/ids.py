"""Names that come from outside: ids of sessions and messages, tenants. Checked before anything sees them.

None of them ever becomes part of a path: what is kept is a hash.
"""

from __future__ import annotations

import re
import secrets
import unicodedata

MAX_LENGTH = 256
_SHOWN = 40  # characters of a refused value that its error message repeats
PATTERN = r"[A-Za-z0-9_][A-Za-z0-9_.:@~+=-]*"
_RANDOM_BYTES = 24


def check_id(field: str, value: object) -> str:
    """Return the value if it can stand in a key, a file name, a URL and a log line.

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


_UNDERSCORED = ("resp", "msg", "rs", "fc")  # as OpenAI and Anthropic write them; clients look at it


def new_id(kind: str) -> str:
    """Return an id that cannot be guessed: 192 random bits after what it names, e.g. "session-..."."""
    return f"{kind}{'_' if kind in _UNDERSCORED else '-'}{secrets.token_urlsafe(_RANDOM_BYTES)}"


def _shown(value: str) -> str:
    return ascii(value if len(value) <= _SHOWN else value[:_SHOWN] + "...")


def check_session_id(session: str) -> str:
    """Return the session id if it is a valid one.

    Raises:
        TypeError: it is not a string.
        ValueError: it is empty, longer than 256 characters, or has `..`, a slash, a backslash or a control
            character in it.
    """
    if not _check_name("session id", session):
        raise ValueError("session id: it is empty; give it 1 to 256 characters")
    return session


def check_tenant(tenant: str) -> str:
    """Return the tenant if it is valid as a session id is, or ""."""
    return _check_name("tenant", tenant)


def _check_name(field: str, name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{field}: {type(name).__name__} is not a string")
    if len(name) > MAX_LENGTH:  # before anything looks at each character
        raise ValueError(f"{field}: {len(name)} characters are too many; use at most {MAX_LENGTH}")
    if ".." in name or "/" in name or "\\" in name:
        raise ValueError(f"{field}={name!r}: it looks like a path; leave out slashes and '..'")
    if any(unicodedata.category(letter)[0] == "C" for letter in name):
        raise ValueError(f"{field}={name!r}: it has control characters; leave them out")
    return name
