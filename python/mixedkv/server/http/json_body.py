"""Reads bodies of JSON: large ones apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel

from mixedkv.server.pools import LARGE, in_pool


class JSONRoute(APIRoute):
    """For `APIRouter(route_class=...)`."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()
        model = self.body_field.field_info.annotation if self.body_field is not None else None

        async def handler(request: Request) -> Any:
            body = await request.body()
            if model is None or len(body) <= LARGE or "json" not in request.headers.get("content-type", ""):
                return await handle(request)
            pools = request.app.state.server.pools
            read = await in_pool(pools.bodies, pools.body_reader.read, model, body)
            return await handle(_ReadRequest(request, body, read))

        return handler


class _ReadRequest(Request):
    """One whose body is an object already."""

    def __init__(self, request: Request, body: bytes, read: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._body, self._read = body, read

    async def json(self) -> Any:
        return self._read
