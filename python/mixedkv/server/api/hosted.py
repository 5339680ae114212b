"""Drops what only a hosted service can do from a body, so that an agent that asks for it is answered all the
same. The response names what was dropped.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from pydantic import ModelWrapValidatorHandler, PrivateAttr, model_validator
from typing_extensions import Self

from mixedkv.server.api.fields import Model

_LETTERS = re.compile(r"[a-zA-Z][a-zA-Z_]*")


class WithoutHosted(Model):
    """A body from which `drop_hosted` takes tools, items and blocks of kinds that this server lacks.

    Attributes:
        dropped: the names of what was dropped, as in `tools[].web_search`.
    """

    _dropped: list[str] = PrivateAttr(default_factory=list)

    @property
    def dropped(self) -> list[str]:
        return self._dropped

    @classmethod
    def drop_hosted(cls, body: dict[str, Any], filtered: Filtered) -> dict[str, Any]:
        """Return a body without what is hosted."""
        raise NotImplementedError

    @model_validator(mode="wrap")
    @classmethod
    def _drop(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        filtered = Filtered()
        found = handler(cls.drop_hosted(dict(value), filtered) if isinstance(value, dict) else value)
        found._dropped = filtered.dropped
        return found


class Filtered:
    """Filters lists, and notes in `dropped` what is left out."""

    def __init__(self) -> None:
        self.dropped: list[str] = []

    def of(self, where: str, parts: Any, ours: Collection[str | None]) -> Any:
        """Return a list without the objects whose `type` is none of ours; anything else as it is."""
        if not isinstance(parts, list):
            return parts
        hosted = [isinstance(part, dict) and _is_hosted(part.get("type"), ours) for part in parts]
        names = (_name(part.get("type")) for part, is_hosted in zip(parts, hosted, strict=True) if is_hosted)
        self.dropped += [f"{where}.{name}" for name in names]
        return [part for part, is_hosted in zip(parts, hosted, strict=True) if not is_hosted]


def _is_hosted(kind: Any, ours: Collection[str | None]) -> bool:
    return (kind is None or isinstance(kind, str)) and kind not in ours


def _name(kind: str | None) -> str:
    """Return a kind without its version: web_search_20250305 is web_search."""
    found = _LETTERS.match(kind or "")
    return found[0].rstrip("_")[:40] if found else "unknown"
