"""Runs an application on an address or a Unix socket, until a signal comes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol, cast

import uvicorn
from starlette.types import ASGIApp

from mixedkv_server.http.connection import Connection
from mixedkv_server.http.entrance import Entrance
from mixedkv_server.http.middleware import RequestIds, RootPath
from mixedkv_server.http.places import Places
from mixedkv_server.settings import ServerSettings
from mixedkv_service.signals import ENDING, ignore_ends
from mixedkv_service.tls import TLS

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None  # type: ignore[assignment]

log = logging.getLogger("mixedkv.server")

_OWN_FILES = 256  # for the store, the metadata and connections that are being refused
_LONGEST_END = 60.0  # seconds to store KV and close everything, after the drain timeout
_LAST_SECONDS = 2.0  # seconds for a client to take its answer, after the drain timeout
_ACCEPT = 32  # connections in a turn of the event loop, which has them open for three, whatever their limit
_BACKLOG = 1024  # connections that the kernel completes and keeps until they are accepted


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
                http=cast(Any, self._enter),
                ws="none",
                loop="asyncio",  # whatever other implementations are installed
                log_config=None,  # for its tracebacks to go through `logs`
                log_level="error",  # a warning for each malformed request would fill the log
                access_log=False,  # paths have session ids in them; `RequestIds` writes routes
                server_header=False,
                backlog=_ACCEPT,
                timeout_graceful_shutdown=int(settings.drain_timeout + 2 * _LAST_SECONDS) + 1,
            )
        )
        self._served, self._tls, self._signal = served, tls, ""
        self._places = Places(_allow_connections(settings.max_connections, 2 if settings.routed else 1))

    def _enter(self, **uvicorns: Any) -> Entrance:
        """Return the protocol of a new connection."""
        settings = self._served.settings
        make = partial(
            Connection,
            head_seconds=settings.read_timeout,
            stall_seconds=settings.request_timeout,
            **uvicorns,
        )
        return Entrance(make, self._places, self._tls, settings.read_timeout)

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(_BACKLOG)  # asyncio has one number for both

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture signals like the base class, but do not raise the signal again at the end.

        An orderly shutdown exits with 0. KV is stored after it, which a second signal must not cut off.
        """
        for number in ENDING:
            signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            ignore_ends()

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Stop the server. A second signal changes nothing, as `drain_timeout` limits the remaining time."""
        if not self.should_exit:
            self._signal = signal.Signals(sig).name
            stuck = self._served.stuck_seconds  # then nothing ends, however long it may take
            end_within(_LAST_SECONDS if stuck else self._served.settings.drain_timeout + _LONGEST_END)
        self.should_exit = True

    async def shutdown(self, sockets: Any = None) -> None:
        self._served.ready = False
        seconds = self._served.settings.drain_timeout
        end = time.monotonic() + seconds
        log.info(  # not in the signal's handler, which may interrupt a line of the log
            "%s: shutting down, %d requests at work have up to %g s, new ones are refused",
            self._signal or "stopped",
            len(self.server_state.tasks),
            seconds,
        )
        if not await self._served.drain(seconds):
            log.warning("requests were cut off after %g seconds", seconds)
        # a client that does not take its answer delays nobody
        patience = max(_LAST_SECONDS, end - time.monotonic())
        self._places.drop_unfinished()
        asyncio.get_running_loop().call_later(patience, self._abort_connections)
        await super().shutdown(sockets)

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.transport.abort()


def _allow_connections(requested: int, n_files: int = 1) -> int:
    """Raise the limit on open files, which often is 1024. Return how many connections leave enough for the
    store.

    Args:
        n_files: files of a connection: a router has one to the model's process too.
    """
    if resource is None:
        return requested
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = requested * n_files + _OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < need:
        soft = need if hard == resource.RLIM_INFINITY else min(need, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= need:
        return requested
    allowed = max(1, (soft - _OWN_FILES) // n_files)
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
