"""Answers Prometheus on a port of its own, in a time of its own, a few clients at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

_SECONDS = 5.0  # for a request and its answer
_MOST = 16  # connections; a new one takes the place of the oldest
_HEAD_BYTES = 8192


@asynccontextmanager
async def serve_metrics(host: str, port: int, registry: CollectorRegistry) -> AsyncIterator[int]:
    """Serve the metrics meanwhile, and yield the port.

    Raises:
        OSError: the port is taken.
    """
    door = _MetricsDoor(registry)
    server = await asyncio.start_server(door.answer, host, port, limit=_HEAD_BYTES, backlog=_MOST)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        door.close()


class _MetricsDoor:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._open: dict[asyncio.StreamWriter, None] = {}  # the oldest first

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the one request of a connection, and close it."""
        if len(self._open) >= _MOST:
            self._drop(next(iter(self._open)))
        self._open[writer] = None
        try:
            with suppress(
                OSError, asyncio.TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError
            ):
                await asyncio.wait_for(self._exchange(reader, writer), _SECONDS)
        finally:
            self._drop(writer)

    def close(self) -> None:
        for writer in list(self._open):
            self._drop(writer)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method = (await reader.readuntil(b"\r\n\r\n")).partition(b" ")[0]
        status, body = "200 OK", generate_latest(self._registry)
        if method not in (b"GET", b"HEAD"):
            status, body = "405 Method Not Allowed", b"use GET\n"
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE_LATEST}\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        writer.write(head.encode() + (b"" if method == b"HEAD" else body))
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        self._open.pop(writer, None)
        writer.transport.abort()
