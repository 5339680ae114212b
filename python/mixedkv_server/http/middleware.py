"""ASGI layers before the endpoints: who may call from where, ids of requests with the access log, further
paths, keys of tenants, and limits on bodies in size and time.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mixedkv.hosts import is_local
from mixedkv.work.presence import presence
from mixedkv_server.api_error import ApiError, no_key, timed_out, too_many_connections
from mixedkv_server.http.places import PLACE, ConnectionPlace
from mixedkv_server.http.revoked import Ending, WithKeys
from mixedkv_server.http.tenant_bytes import MAX_ANSWER_BYTES, SMALL, TenantBytes
from mixedkv_server.logs import request_id
from mixedkv_service.keys import Keys


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
        inner = dict(scope)  # uvicorn looks at the method in its own
        if scope["type"] == "http":
            root = scope.get("root_path", "")
            path = without(root, scope["path"])
            if path.removeprefix("/").partition("/")[0] in _SHORT:
                inner["path"] = f"{root}/v1{path}"
            if scope["method"] == "HEAD":
                inner["method"] = "GET"
        try:
            await self._app(inner, receive, send)
        finally:
            if "route" in inner:  # for the access log
                scope["route"] = inner["route"]


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
                _log_access(scope, status, n_bytes, time.perf_counter() - began)
            request_id.reset(token)


def _log_access(scope: Scope, status: int, n_bytes: int, seconds: float) -> None:
    """Log an answer. Probes and scrapes come every few seconds, so those that succeed are left out."""
    path = getattr(scope.get("route"), "path", "other")
    if path in _HEALTH and status == 200:
        return
    method = scope["method"] if scope["method"] in _METHODS else "other"
    fields = {
        "method": method,
        "route": path,
        "status": status,
        "bytes": n_bytes,
        "seconds": round(seconds, 6),
    }
    text = "%s %s %d %d bytes %.3f s"
    log.info(text, method, path, status, n_bytes, seconds, extra={"fields": fields})


_OPEN = ("", "/", "/stats", "/docs", "/health", "/ready", "/metrics", "/openapi.json")  # without a key
_OPEN_FOLDER = "/page/"
_HEALTH = ("/health", "/ready", "/metrics")
_LINGER_SECONDS = 1.0
# in a request's scope:
DEADLINE = "mixedkv.deadline"  # time of the event loop at which the request is given up
HOLD_ANSWER = "mixedkv.hold_answer"  # counts the bytes that an answer may have
TENANT = "mixedkv.tenant"  # tenant whose key it has; None without a valid key
_LARGEST_AT_A_TIME = 8  # all bodies together may take this many times the largest size
_BYTES_PER_SECOND = 16_000_000  # of a tenant's large bodies, while other tenants have requests


class BodyLimit:
    """Answers 401 without a valid key, whatever else is wrong with the request; 413 for a body of more than
    `max_bytes`; 408 for a body that is not complete after `read_seconds`; 429 while all bodies together are
    too large and this tenant has its share of them; 504 if no answer begins within `seconds`; and 401 if its
    key is removed before.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, read_seconds: float, seconds: float, keys: Keys, count: Any
    ) -> None:
        self._app, self._max_bytes = app, max_bytes
        self._read_seconds, self._seconds = read_seconds, seconds
        self._with_keys, self._count = WithKeys(keys), count
        most = f"{_LARGEST_AT_A_TIME} times max_body_mb={max_bytes / 1e6:g}"
        self._bodies = TenantBytes(_LARGEST_AT_A_TIME * max_bytes, partial(_too_many_bytes, "bodies", most))
        most = f"{_LARGEST_AT_A_TIME} times {MAX_ANSWER_BYTES} bytes"
        self._answers = TenantBytes(
            _LARGEST_AT_A_TIME * MAX_ANSWER_BYTES, partial(_too_many_bytes, "answers", most)
        )
        self._read_until: dict[str, float] = {}  # when each tenant's large bodies so far are paid for

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                path = getattr(route, "path", "other")  # never one that a client made up
                self._count.labels(path, str(message["status"])).inc()
            await send(message)

        scope[DEADLINE] = asyncio.get_running_loop().time() + self._seconds
        headers = Headers(scope=scope)
        scope[TENANT] = self._with_keys.tenant(headers)
        held = _Held(scope[TENANT] or "")
        scope[HOLD_ANSWER] = partial(self._hold_answer, held)
        ending = self._with_keys.enter(scope, headers, scope[TENANT])
        try:
            with presence.of(held.tenant) if scope[TENANT] is not None else nullcontext():
                error = await self._read_or_refuse(scope, receive, held)
                if error is not None:
                    await error.response(_path(scope))(scope, receive, counted)
                elif held.parts is not None:
                    await self._answer(scope, held.replay(receive), counted, ending)
        finally:
            self._with_keys.leave(ending)
            self._release(held)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, ending: Ending) -> None:
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        work = asyncio.ensure_future(self._app(scope, receive, noted))
        try:
            left = scope[DEADLINE] - asyncio.get_running_loop().time()
            ends: set[asyncio.Future[Any]] = {work, ending.revoked}
            await asyncio.wait(ends, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
            if work.done() or begun:  # a stream says itself why it ends
                await work
                return
        finally:
            work.cancel()
        await asyncio.wait({work}, timeout=_LINGER_SECONDS)
        if not begun:
            error = ending.revoked.result() if ending.revoked.done() else timed_out(self._seconds)
            await error.response(_path(scope))(scope, receive, send)
        begun = True

    async def _read_or_refuse(self, scope: Scope, receive: Receive, held: _Held) -> ApiError | None:
        try:
            await self._read_in_time(scope, receive, held)
        except asyncio.TimeoutError:
            message = f"the body did not come within {self._read_seconds:g} seconds: send it faster, or less"
            refusal = ApiError(408, message, code="request_timeout", headers={"Connection": "close"})
        except ApiError as error:
            refusal = error
        else:
            return None
        self._release(held)  # the answer to a request that took too long
        return refusal

    async def _read_in_time(self, scope: Scope, receive: Receive, held: _Held) -> None:
        """Read the body of a request in `read_seconds`, besides the time that it was made to wait here.

        Raises:
            ApiError: as `_read`.
            TimeoutError: it did not come in time.
        """
        work = asyncio.ensure_future(self._read(scope, receive, held))
        left = self._read_seconds
        try:
            while left > 0 and not work.done():
                await asyncio.wait({work}, timeout=left)
                left, held.waited = held.waited, 0.0
        finally:
            if is_late := not work.done():
                work.cancel()
        if is_late:
            await asyncio.wait({work})
            raise asyncio.TimeoutError
        work.result()

    def _check_place(self, scope: Scope, path: str) -> None:
        """Let the connection in as its tenant's. Health checks are answered beyond the limit too.

        Raises:
            ApiError: 503, there are too many connections.
        """
        place: ConnectionPlace | None = scope.get(PLACE)  # None where another server runs this application
        if place is None:
            return
        if scope[TENANT] is not None and path not in _OPEN and not place.let_in(scope[TENANT]):
            raise too_many_connections()
        if place.is_beyond and path not in _HEALTH:
            raise too_many_connections()

    async def _read(self, scope: Scope, receive: Receive, held: _Held) -> None:
        """Read the body of a request.

        Raises:
            ApiError: 401, it needs a key; 503, its tenant has more connections than there are places; 413, it
                is too large; 429, all bodies together are.
        """
        path = _path(scope)
        if path in _OPEN or path.startswith(_OPEN_FOLDER):
            self._check_place(scope, path)
            return  # these take no body, so that nobody holds a place by sending one slowly
        if scope[TENANT] is None:
            raise no_key()
        self._check_place(scope, path)
        limit = self._max_bytes
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value[:20]) > limit:
                raise self._too_large(limit)
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":  # the client has gone
                held.parts = None
                return
            part = message.get("body", b"")
            more = message.get("more_body", False)
            size += len(part)
            self._reserve(held, size, limit)
            held.parts.append(part)
            if size > SMALL and presence.has_others(held.tenant):
                await self._wait_for_turn(held, len(part))

    async def _wait_for_turn(self, held: _Held, n: int) -> None:
        """Read large bodies of a tenant at a limited rate, since the event loop reads those of all."""
        tenant, now = held.tenant, asyncio.get_running_loop().time()
        end = max(now, self._read_until.get(tenant, now)) + n / _BYTES_PER_SECOND
        self._read_until = {name: at for name, at in self._read_until.items() if at > now} | {tenant: end}
        held.waited += end - now
        await asyncio.sleep(end - now)

    def _reserve(self, held: _Held, size: int, limit: int) -> None:
        if size > limit:
            raise self._too_large(limit)
        more = max(0, size - held.size)
        try:
            self._bodies.hold(held.tenant, more, total=size)
        except ApiError:
            self._release(held)  # at once, so that a body in the same turn of the event loop has room
            raise
        held.size += more

    def _hold_answer(self, held: _Held, n: int) -> None:
        """Count the memory of an answer that may have `n` bytes, until the client has it.

        Raises:
            ApiError: 429, the answers of this tenant may become too large.
        """
        self._answers.hold(held.tenant, n)
        held.answer += n

    def _release(self, held: _Held) -> None:
        """Count the memory of a body and its answer as free."""
        self._bodies.add(held.tenant, -held.size)
        self._answers.add(held.tenant, -held.answer)
        held.size, held.answer, held.parts = 0, 0, None

    def _too_large(self, limit: int) -> ApiError:
        message = f"the body is larger than {limit} bytes, which is what this server takes"
        return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


def _too_many_bytes(what: str, limit: str) -> ApiError:
    return ApiError(
        429,
        f"the {what} of requests at work take {limit}, which is the limit: try again later",
        code="too_many_bytes",
        headers={"Retry-After": "1", "Connection": "close"},
    )


class _Held:
    """A body in memory: the bytes received so far and its parts, which are None if it is incomplete; and how
    many bytes its answer may have.

    Attributes:
        waited: seconds that it was made to wait for its turn, which its client cannot help.
    """

    def __init__(self, tenant: str) -> None:
        self.tenant, self.size, self.answer = tenant, 0, 0
        self.waited = 0.0
        self.parts: Any = []

    def replay(self, receive: Receive) -> Receive:
        """Receive the whole body as one message, then whatever follows."""
        messages = [{"type": "http.request", "body": b"".join(self.parts), "more_body": False}]
        self.parts = None

        async def next_message() -> Message:
            return messages.pop() if messages else await receive()

        return next_message


def _path(scope: Scope) -> str:
    return without(scope.get("root_path", ""), scope["path"])
