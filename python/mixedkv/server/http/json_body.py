"""Reads JSON: a large body off the event loop, and none of more parts than a request can have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.exceptions import HTTPException
from fastapi.routing import APIRoute

from mixedkv.server.pools import LARGE, in_pool

_MAX_PARTS = 250_000  # objects and arrays, of 60 to 240 bytes; 100,000 messages of one part are 200,000
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


class JSONRoute(APIRoute):
    """For `APIRouter(route_class=...)`."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Any:
            return await handle(_JSONRequest(request.scope, request.receive))

        return handler


class _JSONRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= LARGE:
            return json.loads(body)
        return await in_pool(self.app.state.server.pools.bodies, _parse, body)


def _parse(body: bytes) -> Any:
    if _n_parts(body) > _MAX_PARTS and _n_parts(_STRING.sub(b"", body)) > _MAX_PARTS:
        raise HTTPException(400, f"the body has more than {_MAX_PARTS} objects and lists: send less")
    return json.loads(body)


def _n_parts(body: bytes) -> int:
    return body.count(b"{") + body.count(b"[")
