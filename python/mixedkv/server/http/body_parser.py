"""Parses JSON bodies. Decoding holds the interpreter's lock, and all streams wait meanwhile: what a body may
have is limited, so that the costliest one of 8 MB takes a tenth of a second.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from mixedkv.server.api_error import ApiError
from mixedkv.server.unknown_fields import Fields, read_fields

_M = TypeVar("_M", bound=BaseModel)
# a microsecond each to decode, and up to five to validate: a message of one part has seven of these
_MAX_PARTS = 1 << 16  # objects, lists and fields
_MAX_VALUES = 1 << 18  # of all lists and objects, as token ids are
_MAX_QUOTES = 2 * (_MAX_PARTS + _MAX_VALUES)  # a value has two, and so has a field's name


class BodyParser:
    """Parses large bodies one after the other. As long as one took, the event loop then does other work."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._rest = 0.0  # seconds to wait before the next one

    async def parse(self, model: type[_M], body: bytes, strict: bool) -> tuple[_M, Fields]:
        """Parse a large body, see `parse`."""
        async with self._lock:
            await asyncio.sleep(self._rest)
            began = time.perf_counter()
            try:
                return parse(model, body, strict)
            finally:
                self._rest = time.perf_counter() - began


def parse(model: type[_M], body: bytes, strict: bool) -> tuple[_M, Fields]:
    """Parse a body. Return it and its fields without effect. If `strict`, unknown fields are errors.

    Raises:
        RequestValidationError: the body is not JSON or does not match `model`; only the first error is
            reported.
        ApiError: 400, the body has too many parts.
    """
    _check_parts(body)
    try:
        return read_fields(model, json.loads(body), strict)
    except ValidationError as error:
        first: Any = error.errors(include_url=False, include_context=False, include_input=False)[0]
    except ValueError as error:
        first = {"type": "json_invalid", "loc": (), "msg": str(error)}
    except (RecursionError, MemoryError):
        raise ApiError(400, "the body is nested too deep, or too large: send less") from None
    raise RequestValidationError([{**first, "loc": ("body", *first["loc"])}])


def _check_parts(body: bytes) -> None:
    """Refuse a body that would take long to decode."""
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
