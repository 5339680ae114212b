"""Reads bodies of JSON: large ones apart. Unknown fields are taken off, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel

from mixedkv.server.body_process import read
from mixedkv.server.body_reader import body_of
from mixedkv.server.pools import LARGE, in_pool


class JSONRoute(APIRoute):
    """For `APIRouter(route_class=...)`."""

    any_content_type = False  # whether a body need not say that it is JSON

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()
        model = self.body_field.field_info.annotation if self.body_field is not None else None

        async def handler(request: Request) -> Any:
            body = await request.body()
            is_json = self.any_content_type or "json" in request.headers.get("content-type", "")
            if not (isinstance(model, type) and issubclass(model, BaseModel)) or not body or not is_json:
                return await handle(request)
            state = request.app.state
            pools, strict = state.server.pools, state.server.settings.strict
            if len(body) > LARGE:
                found, ignored = await in_pool(pools.bodies, pools.body_reader.read, model, body, strict)
            else:
                found, ignored = body_of(model, read(model, body, strict))
            if ignored:
                state.said.ignored_fields(self.path, ignored)
            return await handle(_ReadRequest(request, body, found))

        return handler


class PlainJSONRoute(JSONRoute):
    """Of an API whose clients send JSON without saying so (`curl -d`)."""

    any_content_type = True


class _ReadRequest(Request):
    """One whose body is an object already."""

    def __init__(self, request: Request, body: bytes, read: BaseModel) -> None:
        scope = dict(request.scope)
        scope["headers"] = [each for each in scope["headers"] if each[0] != b"content-type"]
        scope["headers"].append((b"content-type", b"application/json"))
        super().__init__(scope, request.receive)
        self._body, self._read = body, read

    async def json(self) -> Any:
        return self._read
