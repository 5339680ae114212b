"""Gives each request an id, which its answer and its lines in the log carry, and writes the access log."""

from __future__ import annotations

import logging
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mixedkv.server.logs import request_id

log = logging.getLogger("mixedkv.access")

_METHODS = ("GET", "HEAD", "POST", "PATCH", "DELETE", "PUT", "OPTIONS")


class RequestIds:
    """Wraps the whole application, so that answers to its bugs have ids too. The access log has routes
    instead of paths, and nothing else that a client made up.
    """

    def __init__(self, app: ASGIApp, access_log: bool) -> None:
        self._app, self._access_log = app, access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = f"req-{secrets.token_hex(12)}"
        began, status, n_bytes = time.perf_counter(), 0, 0

        async def named(message: Message) -> None:
            nonlocal status, n_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", name.encode())]}
            elif message["type"] == "http.response.body":
                n_bytes += len(message.get("body", b""))
            await send(message)

        token = request_id.set(name)
        try:
            await self._app(scope, receive, named)
        finally:
            if self._access_log:
                method = scope["method"] if scope["method"] in _METHODS else "other"
                path = getattr(scope.get("route"), "path", "other")
                seconds = time.perf_counter() - began
                log.info("%s %s %d %d bytes %.3f s", method, path, status, n_bytes, seconds)
            request_id.reset(token)
