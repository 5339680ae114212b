"""One request to the process of a model, and its answer as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import h11

Headers = Sequence[tuple[bytes, bytes]]
ENDED = (OSError, h11.RemoteProtocolError)  # what is raised where the process ends in between
_READ_BYTES = 1 << 16


class Exchange:
    """A connection for one request. Closing it early cancels the request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT)

    @classmethod
    async def begin(
        cls, path: str, method: str, target: str, headers: Headers = (), body: bytes = b""
    ) -> Exchange:
        """Send a request to the Unix socket at `path`.

        Raises:
            OSError: nobody listens there.
        """
        exchange = cls(*await asyncio.open_unix_connection(path))
        try:
            await exchange._send(method, target, headers, body)
        except BaseException:
            exchange.close()
            raise
        return exchange

    async def head(self) -> h11.Response:
        """Wait for the status and the headers.

        Raises:
            OSError, h11.RemoteProtocolError: the process has ended.
        """
        while not isinstance(event := await self._next(), h11.Response):
            if isinstance(event, h11.ConnectionClosed):
                raise ConnectionResetError("the process has ended")
        return event

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Raises as `head` does."""
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)

    def close(self) -> None:
        self._writer.close()

    async def _send(self, method: str, target: str, headers: Headers, body: bytes) -> None:
        own = [(b"connection", b"close"), (b"content-length", str(len(body)).encode())]
        if not any(name == b"host" for name, _ in headers):
            own.append((b"host", b"localhost"))
        request = h11.Request(method=method, target=target, headers=[*headers, *own])
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            self._writer.write(self._http.send(event) or b"")
        await self._writer.drain()

    async def _next(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_READ_BYTES))
        return event


async def get(path: str, target: str, headers: Headers = ()) -> tuple[int, bytes]:
    """Return the status and the body of a GET. Raises as `Exchange.head` does."""
    exchange = await Exchange.begin(path, "GET", target, headers)
    try:
        head = await exchange.head()
        return head.status_code, b"".join([part async for part in exchange.parts()])
    finally:
        exchange.close()
