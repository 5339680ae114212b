"""HTTP/1.1 as far as streamed answers need it, over a connection that is kept, as clients do.

The client shares the processor with the servers it measures, and must take little of it: about 70
microseconds a token, where httpx takes 190.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from mixedkv_bench.harness.contexts import CannotRunError

_TIMEOUT = 600.0  # seconds for a request, which may wait for others
_LIMIT = 2**20  # bytes of a header or a chunk's


@asynccontextmanager
async def connect(url: str) -> AsyncIterator[ClientConnection]:
    """Connect to a server, for one request after the other.

    Raises:
        CannotRunError: nobody listens there.
    """
    place = urlsplit(url)
    try:
        reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=_LIMIT)
    except OSError as error:
        raise CannotRunError(f"{url} cannot be reached: {error.strerror or error}") from None
    try:
        yield ClientConnection(reader, writer, place.netloc)
    finally:
        writer.close()


class ClientConnection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader, self._writer, self._host = reader, writer, host

    def send(self, path: str, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        self._writer.write(head.encode() + data)

    async def lines(self) -> AsyncIterator[bytes]:
        """Lines of the answer's body as they come.

        Raises:
            CannotRunError: the server refused, or the connection broke.
        """
        alarm = asyncio.get_running_loop().call_later(_TIMEOUT, self._writer.transport.abort)
        try:
            async for line in self._lines():
                yield line
        except CannotRunError:
            raise
        except (OSError, EOFError, ValueError) as error:
            raise CannotRunError(f"the connection broke: {error or type(error).__name__}") from None
        finally:
            alarm.cancel()

    async def _lines(self) -> AsyncIterator[bytes]:
        head = await self._reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if status != 200 or b"transfer-encoding: chunked" not in head.lower():
            text = (await self._reader.read(500)).decode(errors="replace")
            raise CannotRunError(f"the server answered {status} instead of a stream: {text}")
        rest = b""
        while size := int(await self._reader.readline(), 16):
            data = await self._reader.readexactly(size + 2)
            *lines, rest = (rest + data[:-2]).split(b"\n")
            for line in lines:
                yield line
        await self._reader.readline()  # the end of the last chunk
