"""An engine with its whole HTTP API, called through a handle in place of a socket."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, MutableMapping
from contextlib import AsyncExitStack, ExitStack
from typing import Any

from mixedkv.doors.keys import Keys
from mixedkv.errors import ClosedError
from mixedkv.ray.prefix import Prefix
from mixedkv.server.app import make_app
from mixedkv.server.http.request_id import RequestIds
from mixedkv.server.serve import open_server
from mixedkv.server.settings import load_settings
from mixedkv.server.state import ServerState

Message = dict[str, Any]


class EngineReplica:
    """Loads its model when it is made. When it goes, what it holds is stored, and sent to the remote.

    Args:
        environ: settings, as variables of the environment.
    """

    def __init__(self, environ: dict[str, str]) -> None:
        settings = load_settings({}, environ=environ)
        sys.setswitchinterval(0.0005)
        self._stack, self._seconds = ExitStack(), settings.drain_timeout
        self._begun: AsyncExitStack | None = None
        self._server: ServerState | None = None
        keys = Keys.of(settings.api_key_file, settings.api_key)
        self._server = open_server(settings, keys, self._stack)
        self._app = make_app(self._server)
        self._asgi = RequestIds(self._app, settings.access_log)

    async def handle(self, scope: Message, body: bytes, prefix: Prefix) -> AsyncIterator[Message]:
        """Yield the ASGI messages of an answer.

        Args:
            scope: of the request.
            prefix: for the router.
        """
        if self._begun is None:
            self._begun = AsyncExitStack()
            await self._begun.enter_async_context(self._app.router.lifespan_context(self._app))
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        gone, received = asyncio.Event(), iter([{"type": "http.request", "body": body, "more_body": False}])

        async def send(message: MutableMapping[str, Any]) -> None:
            await messages.put(dict(message))

        async def receive() -> Message:
            if (message := next(received, None)) is not None:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        task = asyncio.create_task(self._asgi(scope, receive, send))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
            task.result()
        finally:
            gone.set()

    def check_health(self) -> None:
        """Check that the engine lives, as Ray Serve asks.

        Raises:
            ClosedError: the engine has ended; Ray Serve replaces the replica.
        """
        if self._server is None or not all(engine.alive for engine in self._server.engines):
            raise ClosedError("the engine has ended")

    async def __del__(self) -> None:
        """Shut down. Ray Serve calls it once, when no request is under way any more."""
        if self._server is not None:
            await self._server.drain(self._seconds)
        if self._begun is not None:
            await self._begun.aclose()
        await asyncio.to_thread(self._stack.close)
