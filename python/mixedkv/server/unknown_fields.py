"""Finds fields of a request that have no effect. Unknown fields are removed and logged once; the response
names all of them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from pydantic import BaseModel

log = logging.getLogger("mixedkv.server")

IGNORED = "Accepted and ignored."  # beginning of the description of a field without effect

_M = TypeVar("_M", bound=BaseModel)
# what names of fields look like; anything else may be somebody's text, which is never logged
_NAME = re.compile(r"([a-z][a-z_]{0,39}(\[\])?\.)*[a-zA-Z][a-zA-Z_]{0,39}", re.ASCII)
_MOST_TOLD = 32  # names in one response
_AS_ALWAYS = ("auto", "default", "standard_only")  # values that ask for the default
_MOST = 200  # names that are logged, as clients can make any number up


def read_tolerantly(model: type[_M], value: Any) -> tuple[_M, list[str]]:
    """Parse `value`. Return the result and the names of fields that `model` does not have, at any depth:
    `messages[].mood`. These are not part of the result.

    Raises:
        ValidationError: a known field is wrong.
    """
    found = model.model_validate(value, extra="allow")
    return found, sorted(set(_take_off(found, "")))


def _take_off(found: BaseModel, path: str) -> Iterator[str]:
    if extra := found.__pydantic_extra__:
        yield from [path + name for name in extra]
        extra.clear()
    for name in found.model_fields_set & type(found).model_fields.keys():
        value = getattr(found, name)
        if isinstance(value, BaseModel):
            yield from _take_off(value, f"{path}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for each in value:
                if isinstance(each, BaseModel):
                    yield from _take_off(each, f"{path}{name}[].")


def without_effect(body: BaseModel, path: str = "") -> set[str]:
    """Return the names of known fields that ask for something but have no effect here, and of what the body
    has dropped.
    """
    found = set(getattr(body, "dropped", ()))
    for name in body.model_fields_set & type(body).model_fields.keys():
        value = getattr(body, name)
        description = type(body).model_fields[name].description or ""
        if description.startswith(IGNORED) and value and value not in _AS_ALWAYS:
            found.add(path + name)
        elif isinstance(value, BaseModel):
            found |= without_effect(value, f"{path}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for each in value:
                if isinstance(each, BaseModel):
                    found |= without_effect(each, f"{path}{name}[].")
    return found


def shown(names: Iterable[str]) -> list[str]:
    """Return the first names in order, with odd ones replaced."""
    return list(dict.fromkeys(_shown(name) for name in sorted(names)))[:_MOST_TOLD]


def _shown(name: str) -> str:
    return name if _NAME.fullmatch(name) else "(an odd name)"


class SaidOnce:
    """Writes a line about each name once, and about at most 200 of them."""

    def __init__(self) -> None:
        self._said: set[tuple[str, str]] = set()

    def ignored_fields(self, path: str, names: Iterable[str]) -> None:
        """Log which fields of a body for `path` were ignored."""
        if new := self._new(path, names):
            log.info("%s: ignored, as nothing here knows them: %s (--strict refuses)", path, ", ".join(new))

    def other_model(self, served: str) -> None:
        """Log that a model of another name answers."""
        if self._new("model", ["another"]):
            log.info("another model than %s was asked for, and it answers (--strict refuses)", served)

    def ignored_option(self, path: str, name: str, why: str) -> None:
        """Log why an option of a body for `path` has no effect."""
        for each in self._new(path, [name]):
            log.info("%s: %s is ignored: %s", path, each, why)

    def _new(self, about: str, names: Iterable[str]) -> list[str]:
        """Return the names that were not logged before, with odd ones replaced."""
        new = [name for name in dict.fromkeys(map(_shown, names)) if (about, name) not in self._said]
        new = new[: max(0, _MOST - len(self._said))]
        self._said.update((about, name) for name in new)
        return new
