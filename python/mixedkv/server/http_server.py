"""Runs an application on an address or a Unix socket, until a signal comes.

Limits how long one client can hold a connection: uvicorn waits forever for the head of a request, and for a
client to take its answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mixedkv.doors.tls import TLS
from mixedkv.server.api_error import ApiError
from mixedkv.server.http.middleware import RequestIds, RootPath, without
from mixedkv.server.settings import ServerSettings

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None  # type: ignore[assignment]

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


log = logging.getLogger("mixedkv.server")

_OWN_FILES = 256  # for the store, the metadata and connections that are being refused
_LONGEST_END = 60.0  # seconds to store KV and close everything, after the drain timeout
_LAST_SECONDS = 2.0  # seconds for a client to take its answer, after the drain timeout
_BACKLOG = 128  # connections that asyncio accepts at once, whatever their limit


class Served(Protocol):
    """Protocol of what an application serves: a model, or a router's models."""

    settings: ServerSettings
    ready: bool

    @property
    def stuck_seconds(self) -> float:
        """Seconds for which nothing has gone on although work waits."""

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and let the others finish; return whether they did within the time."""

    def reload(self) -> None:
        """Read keys again in other processes; this one has read them."""


class HTTPServer(uvicorn.Server):
    """Tells what it serves about a signal, so that waiting requests end and running ones finish."""

    def __init__(self, app: ASGIApp, served: Served, tls: TLS | None) -> None:
        settings = served.settings
        super().__init__(
            uvicorn.Config(
                RootPath(RequestIds(app, settings.access_log), settings.root_path),
                http=Connection.within(settings.read_timeout, settings.request_timeout, settings.root_path),
                ws="none",
                loop="asyncio",  # whatever other implementations are installed
                log_config=None,  # for its tracebacks to go through `logs`
                log_level="error",  # a warning for each malformed request would fill the log
                access_log=False,  # paths have session ids in them; `RequestIds` writes routes
                server_header=False,
                limit_concurrency=_allow_connections(settings.max_connections),
                backlog=_BACKLOG,
                timeout_graceful_shutdown=int(settings.drain_timeout + 2 * _LAST_SECONDS) + 1,
                h11_max_incomplete_event_size=65536,
            )
        )
        if tls is not None:
            self.config.load()
            self.config.ssl = tls.context
        self._served = served

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture signals like the base class, but do not raise the signal again at the end.

        An orderly shutdown exits with 0. KV is stored after it, which a second signal must not cut off.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Stop the server. A second signal changes nothing, as `drain_timeout` limits the remaining time."""
        if not self.should_exit:
            stuck = self._served.stuck_seconds  # then nothing ends, however long it may take
            end_within(_LAST_SECONDS if stuck else self._served.settings.drain_timeout + _LONGEST_END)
        self.should_exit = True

    async def shutdown(self, sockets: Any = None) -> None:
        self._served.ready = False
        seconds = self._served.settings.drain_timeout
        end = time.monotonic() + seconds
        if not await self._served.drain(seconds):
            log.warning("requests were cut off after %g seconds", seconds)
        # a client that does not take its answer delays nobody
        patience = max(_LAST_SECONDS, end - time.monotonic())
        asyncio.get_running_loop().call_later(patience, self._abort_connections)
        await super().shutdown(sockets)

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.transport.abort()


def _allow_connections(wanted: int) -> int:
    """Raise the limit on open files, which often is 1024. Return how many connections leave enough for the
    store.
    """
    if resource is None:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = wanted + _OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < need:
        soft = need if hard == resource.RLIM_INFINITY else min(need, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= need:
        return wanted
    allowed = max(1, soft - _OWN_FILES)
    log.warning("max_connections is %d, since this process may open %d files only", allowed, soft)
    return allowed


def end_within(seconds: float) -> None:
    """End the process with exit code 1 if it still runs after so many seconds. Threads that wait for a disk
    or a database cannot be cancelled, and Python would wait for them.
    """
    timer = threading.Timer(seconds, _end, (seconds,))
    timer.daemon = True  # the timer itself delays nothing
    timer.start()


def _end(seconds: float) -> None:
    names = sorted(thread.name for thread in threading.enumerate() if not thread.daemon)
    log.error(
        "the shutdown took more than %g seconds and is given up; at work: %s", seconds, ", ".join(names)
    )
    os._exit(1)


@contextmanager
def listen(settings: ServerSettings) -> Iterator[socket.socket]:
    """Open a bound socket. The file of a Unix socket is removed when it is closed.

    Raises:
        ValueError: the server cannot listen there.
    """
    if not settings.unix_socket:
        with _bind_address(settings.host, settings.port) as listening:
            yield listening
        return
    with _bind_path(settings.unix_socket) as listening:
        own = os.stat(settings.unix_socket).st_ino
        try:
            yield listening
        finally:
            with suppress(OSError):
                if os.stat(settings.unix_socket).st_ino == own:
                    os.unlink(settings.unix_socket)


def url(listening: socket.socket, tls: bool) -> str:
    """Return the server's URL as a client would write it."""
    if listening.family == socket.AF_UNIX:
        return f"unix:{listening.getsockname()}"
    host, port = listening.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _bind_address(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(f"host={host!r}: {error.strerror}") from None
    # asyncio sets TCP_NODELAY only where the protocol is named; without it a kept-alive client waits 40 ms
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise ValueError(f"{host} port {port} cannot be listened on: {error.strerror}") from None
    return listening


def _bind_path(path: str) -> socket.socket:
    """Bind the socket for its owner only; `chmod` opens it to others."""
    _remove_stale(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listening.bind(path)
    except OSError as error:
        listening.close()
        raise ValueError(f"host={path} cannot be listened on: {error.strerror or error}") from None
    finally:
        os.umask(before)
    return listening


def _remove_stale(path: str) -> None:
    """Remove the socket file of a server that was killed."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise ValueError(f"host={path}: there is a file of that name: remove it, or choose another")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            with suppress(OSError):
                os.unlink(path)
        else:
            raise ValueError(f"host={path}: another process listens there: choose another")
