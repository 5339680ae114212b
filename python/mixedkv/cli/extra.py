"""Packages that only some commands need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def naming_the_extra(extra: str) -> Iterator[None]:
    """While inside, turn the error for a missing package into one that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("mixedkv"):
            raise
        raise ValueError(
            f"this command needs {error.name}, which is not installed: pip install 'mixedkv[{extra}]'"
        ) from None
