"""The first moments of a connection: it takes a place, and with TLS it has a time for its handshake."""

from __future__ import annotations

import asyncio
import sys
from asyncio import sslproto
from collections.abc import Callable
from typing import Any

from mixedkv_server.http.connection import Connection
from mixedkv_server.http.places import ConnectionPlace, Places, address_of
from mixedkv_service.tls import TLS

# asyncio allocates a buffer of this size for each TLS connection, 256 KiB, and hands over as much at once
sslproto.SSLProtocol.max_size = 16384
_HANDSHAKE_SECONDS = 10.0  # four round trips to the other side of the earth take less than two
_CLOSING: dict[str, Any] = {} if sys.version_info < (3, 11) else {"ssl_shutdown_timeout": 2.0}


class Entrance(asyncio.Protocol):
    """Receives a connection before `Connection` does, which takes it over once it may send requests. asyncio
    alone tells of a TLS connection only after its handshake, so nothing would count or end those before it.

    Args:
        make: makes the connection's protocol.
        seconds: a handshake may take, at most.
    """

    def __init__(
        self, make: Callable[[ConnectionPlace], Connection], places: Places, tls: TLS | None, seconds: float
    ) -> None:
        self._make, self._places, self._tls = make, places, tls
        self._seconds = min(seconds, _HANDSHAKE_SECONDS)
        self._loop = asyncio.get_running_loop()
        self._early: list[bytes] = []  # what came before the connection was taken over
        self._handshake: asyncio.Task[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        address = address_of(transport.get_extra_info("peername"))
        place = self._place = self._places.enter(address, transport.abort, self._loop.time())
        if place is None:
            transport.abort()
        elif self._tls is None:
            self._hand_over(transport, place)
        else:
            self._handshake = self._loop.create_task(self._shake_hands(self._tls, place))

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._place is not None:
            self._place.leave()

    async def _shake_hands(self, tls: TLS, place: ConnectionPlace) -> None:
        try:
            transport = await self._loop.start_tls(
                self._transport,
                self,
                tls.context,
                server_side=True,
                ssl_handshake_timeout=self._seconds,
                **_CLOSING,
            )
        except OSError:  # it failed, took too long, or the client has left
            transport = None
        if transport is None or transport.is_closing():
            place.leave()
            self._transport.abort()
        else:
            self._hand_over(transport, place)

    def _hand_over(self, transport: Any, place: ConnectionPlace) -> None:
        connection = self._make(place)
        transport.set_protocol(connection)
        connection.connection_made(transport)
        for data in self._early:
            connection.data_received(data)
        self._early.clear()
