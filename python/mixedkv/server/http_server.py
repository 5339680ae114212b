"""Runs an application until a signal comes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from mixedkv.doors.tls import TLS
from mixedkv.server.http.connection import Connection
from mixedkv.server.http.paths import RootPath
from mixedkv.server.http.request_id import RequestIds
from mixedkv.server.settings import ServerSettings

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None  # type: ignore[assignment]

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
