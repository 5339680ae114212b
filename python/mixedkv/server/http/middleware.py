"""Small ASGI layers: who may call from where, ids of requests with the access log, and further paths."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mixedkv.hosts import is_local
from mixedkv.server.api_error import ApiError
from mixedkv.server.logs import request_id


def without(root: str, path: str) -> str:
    """Return a path without the root, which it may begin with."""
    return path[len(root) :] if root and (path == root or path.startswith(root + "/")) else path


class RootPath:
    """Serves every path both with the root before it and without it. ASGI has the root in `path` and
    `root_path`.
    """

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app, self._root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._root:
            path = self._root + without(self._root, scope["path"])
            scope = {**scope, "path": path, "root_path": self._root}
        await self._app(scope, receive, send)


_SHORT = (  # first parts of such paths
    "chat",
    "completions",
    "embeddings",
    "messages",
    "models",
    "rerank",
    "reranking",
    "responses",
)


class ShortPaths:
    """Treats `/chat/completions` as `/v1/chat/completions` and so on, and HEAD as GET: uvicorn leaves the
    body out.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            root = scope.get("root_path", "")
            path = without(root, scope["path"])
            if path.removeprefix("/").partition("/")[0] in _SHORT:
                scope = {**scope, "path": f"{root}/v1{path}"}
            if scope["method"] == "HEAD":
                scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


_SHOWN = 100


class OwnPagesOnly:
    """Answers 403 to requests that only a page of another site sends. These have an `Origin` that is not the
    server's, or with `local_only` a `Host` that is not this machine, as with DNS rebinding. `hosts` are
    further names to accept; if there are some, no others are. Pages of `origins` may use the server, "*" are
    all. See https://fetch.spec.whatwg.org/#origin-header for when an `Origin` is sent.
    """

    def __init__(
        self, app: ASGIApp, local_only: bool, hosts: Sequence[str] = (), origins: Sequence[str] = ()
    ) -> None:
        self._app, self._checks_host = app, local_only or bool(hosts)
        self._hosts, self._origins = [host.lower() for host in hosts], origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        await (self._app if error is None else error.response())(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        host, origin = headers.get("host"), headers.get("origin")
        name = _name(host or "")
        if self._checks_host and host and not (is_local(name) or name in self._hosts):
            named = f"--allow {name[:_SHOWN]} if that is its name, " if name else ""
            return ApiError(
                403,
                f"this server without keys takes requests to 127.0.0.1, [::1] or localhost only, not to "
                f"{host[:_SHOWN]!r}: serve with {named}with --api-key-file, or with --allow-no-keys if "
                "everybody who can reach it may use it",
                code="host_not_allowed",
            )
        if origin is None or "*" in self._origins or origin in self._origins:
            return None
        if origin.partition("://")[2] != host:
            return ApiError(
                403,
                f"this server without keys takes no requests from pages of other sites, here "
                f"{origin[:_SHOWN]!r}: serve with --allow {origin[:_SHOWN]} if that site may "
                "use it, or with keys",
                code="origin_not_allowed",
            )
        return None


def _name(host: str) -> str:
    """Return the host without its port and without the brackets of an IPv6 address."""
    try:
        return urlsplit("//" + host).hostname or ""
    except ValueError:
        return ""


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
