"""Reads a request's body before anything else does, up to a limit; counts answers by status."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mixedkv.server.auth import Keys
from mixedkv.server.errors import ApiError

_MAX_BYTES_OF_STRANGERS = 4096  # who has no key fills no memory
_LINGER_SECONDS = 1.0


class BodyLimit:
    """413 for a body of more than `max_bytes`, however it is sent; without a key for a smaller one."""

    def __init__(self, app: ASGIApp, max_bytes: int, keys: Keys, count: Any) -> None:
        self._app, self._max_bytes, self._keys, self._count = app, max_bytes, keys, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                path = getattr(route, "path", "other")  # never what a client made up
                self._count.labels(path, str(message["status"])).inc()
            await send(message)

        limit = self._limit(scope)
        body = await self._read(scope, receive, limit)
        if body is None:
            message = f"the body is larger than {limit} bytes, which is what this server takes"
            if limit < self._max_bytes:
                message += " without a key"
            await _let_it_end(scope, receive)
            error = ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
            await error.response()(scope, receive, counted)
            return
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, counted)

    def _limit(self, scope: Scope) -> int:
        key = Headers(scope=scope).get("authorization")
        if self._keys.tenant(key) is None:
            return min(self._max_bytes, _MAX_BYTES_OF_STRANGERS)
        return self._max_bytes

    async def _read(self, scope: Scope, receive: Receive, limit: int) -> bytes | None:
        """The whole body; None if it is too large."""
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value[:20]) > limit:
                return None
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":  # the client has gone
                break
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > limit:
                return None
        return b"".join(parts)


async def _let_it_end(scope: Scope, receive: Receive) -> None:
    """Drop the rest of a body, for a while: a client that still sends when the connection is closed gets a
    reset and never sees the answer.
    """
    if any(name == b"expect" for name, _ in scope["headers"]):
        return  # it waits for leave to send

    async def drop() -> None:
        while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
            pass

    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(drop(), _LINGER_SECONDS)
