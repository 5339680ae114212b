"""Limits how long one client can hold a connection.

uvicorn waits forever for the head of a request, and for a client to take its answer.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mixedkv.server.api_error import ApiError
from mixedkv.server.http.middleware import without

_READ_BYTES = 8192  # in a turn of the event loop: h11 takes more than a second for 256 KiB of tiny chunks
_HEAD_SECONDS_BEYOND = 1.0  # connections that only get a refusal or a health check
_BEYOND = 64
_HEALTH = ("/health", "/ready", "/metrics")
_TOO_MANY = ApiError(
    503,
    "this server has as many connections as it takes: try again later",
    code="too_many_connections",
    headers={"Connection": "close", "Retry-After": "1"},
)


class Connection(H11Protocol):
    """Extends uvicorn's protocol on h11, which bounds the size of a request's head, with bounds in time.

    A connection is closed when a head is not complete `head_seconds` after the connection was made or the
    head's first byte came, when it is the idlest of too many, and when the client takes nothing for
    `stall_seconds` while more than the write buffer's 64 KiB waits for it. What uvicorn answers itself has
    OpenAI's form.
    """

    head_seconds: float
    stall_seconds: float
    root_path: str

    @classmethod
    def within(cls, head_seconds: float, stall_seconds: float, root_path: str = "") -> type[Connection]:
        """Return this class with the given limits, for uvicorn's `http`."""
        bounds = {"head_seconds": head_seconds, "stall_seconds": stall_seconds, "root_path": root_path}
        return type(cls.__name__, (cls,), bounds)

    def connection_made(self, transport: Any) -> None:
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        self.idle_since = self.loop.time()
        if hasattr(transport, "max_size"):  # asyncio's transport; others read less at a time
            transport.max_size = _READ_BYTES
        limit, self.limit_concurrency = self.limit_concurrency, None  # uvicorn's own answer is plain text
        if limit is not None and len(self.connections) > limit:
            self._go_beyond(limit)
        self._await_head()

    def _go_beyond(self, limit: int) -> None:
        """Take the place of the idlest connection. If all are busy, take one of a few places for health
        checks.
        """
        others = (other for other in self.connections if other is not self)
        idle = [other for other in others if isinstance(other, Connection) and other.is_idle]
        if idle:
            min(idle, key=lambda other: other.idle_since).transport.abort()
        elif len(self.connections) > limit + _BEYOND:
            self.transport.abort()
        else:
            self.app = _health_only(self.app, self.root_path)
            self.head_seconds = min(self.head_seconds, _HEAD_SECONDS_BEYOND)

    @property
    def is_idle(self) -> bool:
        """True between requests and before the first."""
        return (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.idle_since = self.loop.time()
        if self.transport.is_closing():  # bytes for the client may still be buffered
            self._await_reader()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._await_reader()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall_timer = _cancel(self._stall_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer = _cancel(self._head_timer)
        self._stall_timer = _cancel(self._stall_timer)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Shut down. A request whose body is not complete gets 503 at once."""
        if self.cycle is not None and not self.cycle.response_complete and self.cycle.more_body:
            self._answer(ApiError(503, "the server is shutting down", code="shutting_down"))
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        self._answer(ApiError(400, "this is not HTTP, or its head is too large", code="invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: there are no WebSockets here, and a line for each attempt would fill the log."""

    def _await_head(self) -> None:
        """Start the timer for the head of a request; between requests only once its first byte is there."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_timer = _cancel(self._head_timer)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self._give_up)

    def _await_reader(self) -> None:
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self.stall_seconds, self.transport.abort)

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            message = f"no request came within {self.head_seconds:g} seconds"
            self._answer(ApiError(408, message, code="request_timeout"))

    def _answer(self, error: ApiError) -> None:
        """Answer without the application, unless it has begun to answer, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._write(error)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # to the application, the client has disconnected
            self.cycle.message_event.set()
        self.transport.close()
        self._await_reader()

    def _write(self, error: ApiError) -> None:
        body = json.dumps(error.body()).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        response = h11.Response(status_code=error.status, headers=headers)
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")


def _health_only(app: ASGIApp, root_path: str) -> ASGIApp:
    """Answer one request for one of a few paths, and refuse others."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        if without(root_path, scope["path"]) in _HEALTH:
            await app(scope, receive, last)
        else:
            await _TOO_MANY.response()(scope, receive, send)

    return answer


def _cancel(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel the timer and return None."""
    if timer is not None:
        timer.cancel()
    return None
