"""Settings of caches that are for tests: they stand in the environment while a context is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def hidden(**settings: str) -> Iterator[None]:
    """Set them: `equalize="0"`, `rounding="8"` or "16", `hot_budget` F16 rows or "all", `in_place="1"`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(f"MIXEDKV_{name.upper()}", value)
        yield
