"""Names that come from outside. None of them ever becomes part of a path: what is kept is a hash."""

from __future__ import annotations

import unicodedata

_NAME_MAX = 256


def check_session_id(session: str) -> str:
    """The session id itself.

    Raises:
        TypeError: it is not a string.
        ValueError: it is empty, longer than 256 characters, or has `..`, a slash, a backslash or a control
            character in it.
    """
    if not _check_name("session id", session):
        raise ValueError("session id: it is empty; give it 1 to 256 characters")
    return session


def check_tenant(tenant: str) -> str:
    """The tenant itself, which may be "". Otherwise as `check_session_id`."""
    return _check_name("tenant", tenant)


def _check_name(field: str, name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{field}: {type(name).__name__} is not a string")
    if len(name) > _NAME_MAX:  # before anything looks at each character
        raise ValueError(f"{field}: {len(name)} characters are too many; use at most {_NAME_MAX}")
    if ".." in name or "/" in name or "\\" in name:
        raise ValueError(f"{field}={name!r}: it looks like a path; leave out slashes and '..'")
    if any(unicodedata.category(letter)[0] == "C" for letter in name):
        raise ValueError(f"{field}={name!r}: it has control characters; leave them out")
    return name
