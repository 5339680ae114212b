"""Reads JSON bodies, one large one at a time. Unknown fields are removed and logged once, or refused; the
response names all fields that have no effect.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterable
from functools import cache
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from mixedkv.log_once import LogOnce
from mixedkv.nearest_word import did_you_mean
from mixedkv.work.fair_pool import FairPool
from mixedkv_server.api_error import ApiError
from mixedkv_server.fields import IGNORED
from mixedkv_server.http.middleware import TENANT
from mixedkv_server.pools import LARGE

log = logging.getLogger("mixedkv.server")

# what names of fields look like; anything else may be somebody's text, which is never logged
_NAME = re.compile(r"([a-z][a-z_]{0,39}(\[\])?\.)*[a-zA-Z][a-zA-Z_]{0,39}", re.ASCII)
_LONGEST_NAME = 200  # characters, with the names of what it is in
_MOST_TOLD = 32  # names in one response
_MOST_COMPARED = 4  # names that are compared with all that are known
_AS_ALWAYS = ("auto", "default", "standard_only")  # values that ask for the default
_MOST = 200  # names that are logged, as clients can make any number up


class JSONRoute(APIRoute):
    """Reads JSON bodies, for `APIRouter(route_class=...)`."""

    any_content_type = False  # whether a body may come without a Content-Type of JSON

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()
        model = self.body_field.field_info.annotation if self.body_field is not None else None

        async def handler(request: Request) -> Any:
            body = await request.body()
            is_json = self.any_content_type or "json" in request.headers.get("content-type", "").lower()
            if not (isinstance(model, type) and issubclass(model, BaseModel)) or not body or not is_json:
                return await handle(request)
            state = request.app.state
            strict = state.server.settings.strict
            found, fields = await parse_in_turn(request, model, body, strict)
            if fields.unknown:
                state.said.ignored_fields(self.path, sorted(fields.unknown))
            response = await handle(_ReadRequest(request, body, found))
            if names := shown(fields.unknown | fields.idle):
                _warn(response, names, model.model_fields)
            return response

        return handler


def _warn(response: Response, names: list[str], known: Collection[str]) -> None:
    """Name the fields without effect in the response: in a header, and in `warnings` of an object, there with
    the known field that may have been meant.
    """
    response.headers["x-ignored-fields"] = ", ".join(names)
    body = getattr(response, "body", b"")
    is_object = response.headers.get("content-type", "").startswith("application/json")
    if is_object and response.status_code < 300 and body.endswith(b"}") and body != b"{}":
        meant = {name: did_you_mean(name, known) for name in names[:_MOST_COMPARED] if name not in known}
        warnings = json.dumps([f"{name}: it has no effect here{meant.get(name, '')}" for name in names])
        response.body = bytes(body[:-1]) + b',"warnings":' + warnings.encode() + b"}"
        response.headers["content-length"] = str(len(response.body))


class PlainJSONRoute(JSONRoute):
    """Reads bodies for an API whose clients send JSON without its Content-Type (`curl -d`)."""

    any_content_type = True


class _ReadRequest(Request):
    """A request whose body was parsed already."""

    def __init__(self, request: Request, body: bytes, read: BaseModel) -> None:
        scope = dict(request.scope)
        scope["headers"] = [each for each in scope["headers"] if each[0] != b"content-type"]
        scope["headers"].append((b"content-type", b"application/json"))
        super().__init__(scope, request.receive)
        self._body, self._read = body, read

    async def json(self) -> Any:
        return self._read


_M = TypeVar("_M", bound=BaseModel)
# a microsecond each to decode, and up to five to validate: a message of one part has seven of these
_MAX_PARTS = 1 << 15  # objects, lists and fields
_MAX_VALUES = 1 << 18  # of all lists and objects, as token ids are
_MAX_QUOTES = 2 * (_MAX_PARTS + _MAX_VALUES)  # a value has two, and so has a field's name


async def parse_in_turn(request: Request, model: type[_M], body: bytes, strict: bool) -> tuple[_M, Fields]:
    """Parse a body, see `parse`: a large one off the event loop, in turns of tenants."""
    if len(body) <= LARGE:
        return parse(model, body, strict)
    pool: FairPool = request.app.state.bodies
    return await pool.run(request.scope[TENANT] or "", parse, model, body, strict)


def parse(model: type[_M], body: bytes, strict: bool) -> tuple[_M, Fields]:
    """Parse a body. Return it and its fields without effect. If `strict`, unknown fields are errors.

    Raises:
        RequestValidationError: the body is not JSON or does not match `model`; only the first error is
            reported.
        ApiError: 400, the body has too many parts.
    """
    text = _text_of(body)
    _check_parts(body)
    try:
        return read_fields(model, json.loads(text), strict)
    except ValidationError as error:
        first: Any = error.errors(include_url=False, include_context=False, include_input=False)[0]
    except ValueError as error:
        first = {"type": "json_invalid", "loc": (), "msg": str(error)}
    except (RecursionError, MemoryError):
        raise ApiError(400, "the body is nested too deep, or too large: send less") from None
    raise RequestValidationError([{**first, "loc": ("body", *first["loc"])}])


_BOM = b"\xef\xbb\xbf"  # which editors on Windows write before UTF-8


def _text_of(body: bytes) -> str:
    """Return a body's text. Only UTF-8 is taken: its parts can be counted in its bytes.

    Raises:
        ApiError: 400, it is in another encoding.
    """
    try:
        if b"\0" not in body[:4]:  # UTF-16 and UTF-32 have zeros in the first brace
            return body.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError:
        pass
    raise ApiError(400, "the body is not in UTF-8: send JSON in UTF-8, whatever its charset", code="not_utf8")


def _check_parts(body: bytes) -> None:
    """Refuse a body that would take long to decode. It is in UTF-8."""
    if _n_parts(body) <= _MAX_PARTS and body.count(b",") <= _MAX_VALUES:
        return
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if unescaped.count(b'"') <= _MAX_QUOTES:
        outside = b"".join(unescaped.split(b'"')[::2])  # of texts
        if _n_parts(outside) <= _MAX_PARTS and outside.count(b",") <= _MAX_VALUES:
            return
    raise ApiError(
        400,
        f"the body has more than {_MAX_PARTS} objects, lists and fields, or {_MAX_VALUES} values: send less",
        code="too_many_parts",
    )


def _n_parts(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[") + text.count(b":")


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
        for name in islice(extra, max(0, _MOST - len(fields.unknown))):
            fields.unknown.add(path + name[: _LONGEST_NAME + 1])
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
    return name if len(name) <= _LONGEST_NAME and _NAME.fullmatch(name) else "(an odd name)"


class SaidOnce:
    """Writes a line about each name once, and about at most 200 of them."""

    def __init__(self) -> None:
        self._once = LogOnce(log, _MOST)

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
        return [name for name in dict.fromkeys(map(_shown, names)) if self._once.is_new((about, name))]
