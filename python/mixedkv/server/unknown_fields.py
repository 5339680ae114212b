"""Finds fields of a request that have no effect. Unknown fields are removed and logged once; the response
names all of them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel

log = logging.getLogger("mixedkv.server")

IGNORED = "Accepted and ignored."  # beginning of the description of a field without effect

_M = TypeVar("_M", bound=BaseModel)
# what names of fields look like; anything else may be somebody's text, which is never logged
_NAME = re.compile(r"([a-z][a-z_]{0,39}(\[\])?\.)*[a-zA-Z][a-zA-Z_]{0,39}", re.ASCII)
_MOST_TOLD = 32  # names in one response
_AS_ALWAYS = ("auto", "default", "standard_only")  # values that ask for the default
_MOST = 200  # names that are logged, as clients can make any number up


class Fields(NamedTuple):
    """The names of a body's fields that have no effect, at any depth: `messages[].mood`."""

    unknown: set[str]
    idle: set[str]  # known fields that ask for something, and what the body has dropped


def read_fields(model: type[_M], value: Any, strict: bool) -> tuple[_M, Fields]:
    """Parse `value`. Unknown fields are not part of the result. If `strict`, they are errors.

    Raises:
        ValidationError: a known field is wrong.
    """
    found = model.model_validate(value, extra=None if strict else "allow")
    fields = Fields(set(), set(getattr(found, "dropped", ())))
    _look(found, "", fields)
    return found, fields


def _look(found: BaseModel, path: str, fields: Fields) -> None:
    if extra := found.__pydantic_extra__:
        fields.unknown.update(path + name for name in extra)
        extra.clear()
    ignored = _ignored(type(found))
    for name in found.model_fields_set:
        if name not in ignored:  # an unknown one
            continue
        value = getattr(found, name)
        if ignored[name]:
            if value and value not in _AS_ALWAYS:
                fields.idle.add(path + name)
        elif isinstance(value, list):
            for each in value if value and isinstance(value[0], BaseModel) else ():
                _look(each, f"{path}{name}[].", fields)
        elif isinstance(value, BaseModel):
            _look(value, f"{path}{name}.", fields)


@cache
def _ignored(model: type[BaseModel]) -> dict[str, bool]:
    """Return for each field of a model whether it is ignored."""
    return {name: (field.description or "").startswith(IGNORED) for name, field in model.model_fields.items()}


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
