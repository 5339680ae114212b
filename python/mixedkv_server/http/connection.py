"""HTTP on one connection: uvicorn's protocol on h11, with limits in time.

uvicorn waits forever for the head of a request, and for a client to take its answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mixedkv_server.api_error import ApiError, too_many_connections
from mixedkv_server.http.framing import StrictConnection
from mixedkv_server.http.places import PLACE, ConnectionPlace, Stage

_READ_BYTES = 8192  # in a turn of the event loop: h11 takes more than a second for 256 KiB of tiny chunks
_HEAD_BYTES = 65536
_HEAD_SECONDS_BEYOND = 1.0  # of a connection beyond the limit
_DROP_SECONDS = 1.0  # for a connection that gives way to take its answer
_LINGER_SECONDS = 1.0


class Connection(H11Protocol):
    """Extends uvicorn's protocol on h11, which bounds the size of a request's head, with bounds in time.

    A connection is closed when a head is not complete `head_seconds` after the connection was made or the
    head's first byte came, when its place is needed, see `Places`, and when the client takes nothing for
    `stall_seconds` while more than the write buffer's 64 KiB waits for it. It is also closed after an answer
    that did not wait for the whole body. What uvicorn answers itself has OpenAI's form.
    """

    conn: StrictConnection

    def __init__(
        self,
        place: ConnectionPlace,
        head_seconds: float,
        stall_seconds: float,
        config: uvicorn.Config,
        **uvicorns: Any,
    ) -> None:
        super().__init__(config, **uvicorns)
        self.conn = StrictConnection(h11.SERVER, _HEAD_BYTES)
        self.app = self._close_if_unread(self.app)
        self.place, self.stall_seconds = place, stall_seconds
        self.head_seconds = min(head_seconds, _HEAD_SECONDS_BEYOND) if place.is_beyond else head_seconds

    def connection_made(self, transport: Any) -> None:
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # asyncio's transport; others read less at a time
            transport.max_size = _READ_BYTES
        self.place.ends_by(self._give_way)
        self._note_stage()
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note_stage()
        self._await_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_stage()
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
        self.place.leave()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Shut down. A request whose body is not complete gets 503 at once."""
        if self.cycle is not None and not self.cycle.response_complete and self.cycle.more_body:
            self._answer(ApiError(503, "the server is shutting down", code="shutting_down"))
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        problem = self.conn.problem or "this is not HTTP, or its head is too large"
        self._answer(ApiError(400, problem, code="invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: there are no WebSockets here, and a line for each attempt would fill the log."""

    def _note_stage(self) -> None:
        if self.cycle is None:
            stage = Stage.HEAD
        elif self.cycle.response_complete:
            stage = Stage.IDLE if self.conn.trailing_data == (b"", False) else Stage.HEAD
        else:
            stage = Stage.BODY if self.cycle.more_body else Stage.ANSWER
        self.place.move(stage, self.loop.time())

    def _give_way(self) -> None:
        """End, as another connection needs the place. Who is sending a body is told so."""
        if self.place.stage is Stage.BODY and self.place.owner is not None:
            self._answer(too_many_connections())
            self.loop.call_later(_DROP_SECONDS, self.transport.abort)
        else:
            self.transport.abort()

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

    def _close_if_unread(self, app: ASGIApp) -> ASGIApp:
        """Return an application whose answers close the connection if they begin before the request's body
        has come: what is left of it would be read as the next request, or for as long as the client sends.
        """

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            cycle, place = self.cycle, self.place

            async def send_closing(message: Message) -> None:
                if message["type"] == "http.response.start":
                    if cycle.more_body:
                        await _drop_rest(scope, receive)
                    if cycle.more_body or place.is_beyond:
                        message = {**message, "headers": _with_close(message.get("headers", ()))}
                await send(message)

            await app({**scope, PLACE: place}, receive, send_closing)

        return answer

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


def _cancel(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel the timer and return None."""
    if timer is not None:
        timer.cancel()
    return None


def _with_close(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return headers that say that the connection closes."""
    return [*(each for each in headers if each[0].lower() != b"connection"), (b"connection", b"close")]


async def _drop_rest(scope: Scope, receive: Receive) -> None:
    """Receive and drop the rest of a body, for a while: a client that is still sending when the connection is
    closed gets a reset and never sees the answer.
    """
    if any(name == b"expect" for name, _ in scope["headers"]):
        return  # it waits for leave to send

    async def drop() -> None:
        while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
            pass

    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(drop(), _LINGER_SECONDS)
