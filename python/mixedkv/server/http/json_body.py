"""Reads JSON bodies. Unknown fields are removed or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response

from mixedkv.server.http.body_parser import parse
from mixedkv.server.pools import LARGE
from mixedkv.server.unknown_fields import shown


class JSONRoute(APIRoute):
    """Reads JSON bodies, for `APIRouter(route_class=...)`."""

    any_content_type = False  # whether a body may come without a Content-Type of JSON

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()
        model = self.body_field.field_info.annotation if self.body_field is not None else None

        async def handler(request: Request) -> Any:
            body = await request.body()
            is_json = self.any_content_type or "json" in request.headers.get("content-type", "")
            if not (isinstance(model, type) and issubclass(model, BaseModel)) or not body or not is_json:
                return await handle(request)
            state = request.app.state
            strict = state.server.settings.strict
            if len(body) > LARGE:
                found, fields = await state.large_bodies.parse(model, body, strict)
            else:
                found, fields = parse(model, body, strict)
            if fields.unknown:
                state.said.ignored_fields(self.path, sorted(fields.unknown))
            response = await handle(_ReadRequest(request, body, found))
            if names := shown(fields.unknown | fields.idle):
                _warn(response, names)
            return response

        return handler


def _warn(response: Response, names: list[str]) -> None:
    """Name the fields without effect in the response: in a header, and in `warnings` of an object."""
    response.headers["x-ignored-fields"] = ", ".join(names)
    body = getattr(response, "body", b"")
    is_object = response.headers.get("content-type", "").startswith("application/json")
    if is_object and response.status_code < 300 and body.endswith(b"}") and body != b"{}":
        warnings = json.dumps([f"{name}: it has no effect here" for name in names])
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
