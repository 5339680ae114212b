"""Passes requests on to the process of the model that they name."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import quote

import h11
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mixedkv.errors import ClosedError, QueueFullError
from mixedkv.server.api.ollama import named_model, without_answer
from mixedkv.server.api.ollama_schemas import OllamaChat, OllamaGenerate
from mixedkv.server.api_error import ApiError, from_engine
from mixedkv.server.fields import Model, Name
from mixedkv.server.http.json_body import BodyParser, parse
from mixedkv.server.http.middleware import without
from mixedkv.server.pending import Disconnected, or_disconnect
from mixedkv.server.pools import LARGE
from mixedkv.server.router.exchange import ENDED, Exchange
from mixedkv.server.router.model_process import ModelLoadError
from mixedkv.server.router.processes import RoutedModel, routed
from mixedkv.server.settings import parse_keep_alive
from mixedkv.server.state import tenant

_NOT_PASSED = (  # of this connection, checked by the router, or said by it
    *(b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"),
    *(b"content-length", b"origin", b"x-request-id", b"date"),
)
_OLLAMA: dict[str, type[OllamaChat | OllamaGenerate]] = {
    "/api/chat": OllamaChat,
    "/api/generate": OllamaGenerate,
}


class Asked(Model):
    """The fields of a body that the router reads."""

    model: Name | None = None
    keep_alive: Any = None
    # of Ollama's API: a request without any of these loads a model, or unloads it
    prompt: Any = None
    suffix: Any = None
    images: Any = None
    messages: Any = None

    @property
    def seconds(self) -> float | None:
        """Seconds that the model stays; None for the default, also for what its process will refuse."""
        try:
            return None if self.keep_alive is None else parse_keep_alive(self.keep_alive)
        except ValueError:
            return None

    @property
    def is_empty(self) -> bool:
        return not (self.prompt or self.suffix or self.images or self.messages)


async def forward(request: Request) -> Response:
    """Answer with what the model's process answers, as it comes. The process is started where need be."""
    owner, path = tenant(request), without(request.scope.get("root_path", ""), request.url.path)
    asked = await _read(request)
    model = routed(named_model(request, asked.model or request.query_params.get("model"), generates=False))
    seconds = asked.seconds if path.startswith("/api/") else None
    if path in _OLLAMA and asked.is_empty and seconds == 0:
        model.processes.let_go(model.place, owner)
        return without_answer(model, _OLLAMA[path].model_construct(), "unload")
    try:
        await or_disconnect(request, model.processes.use(model.place, owner, seconds))
    except ModelLoadError as error:
        raise ApiError(503, str(error), param="model", code="model_not_loaded") from None
    except (QueueFullError, ClosedError) as error:
        raise from_engine(error) from None
    return await pass_on(request, model, partial(model.processes.release, model.place, owner))


async def pass_on(request: Request, model: RoutedModel, release: Callable[[], None]) -> Response:
    """Return the answer of a process that is ready; `release` is called at its end.

    Raises:
        ApiError: 503, the process has ended.
        Disconnected: the client disconnected.
    """
    path = without(request.scope.get("root_path", ""), request.scope["path"])
    query = request.scope["query_string"].decode("ascii", "replace")
    target = quote(path) + (f"?{query}" if query else "")
    headers = [each for each in request.scope["headers"] if each[0] not in _NOT_PASSED]
    exchange = None
    try:
        exchange = await Exchange.begin(
            model.place.process.socket, request.method, target, headers, await request.body()
        )
        return Passed(model, exchange, await or_disconnect(request, exchange.head()), release)
    except BaseException as error:
        if exchange is not None:
            exchange.close()
        release()
        if isinstance(error, ENDED):
            raise _ended(model) from None
        raise


class Passed(Response):
    """An answer that is passed on as it comes. Who disconnects cancels it."""

    def __init__(
        self, model: RoutedModel, exchange: Exchange, head: h11.Response, release: Callable[[], None]
    ) -> None:
        self._model, self._exchange, self._release = model, exchange, release
        self.status_code, self.background, self.body = head.status_code, None, b""
        self.raw_headers = [(name, value) for name, value in head.headers if name not in _PER_CONNECTION]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await or_disconnect(Request(scope, receive), self._pass(send))
        except Disconnected:
            pass
        finally:
            self._exchange.close()
            self._release()

    async def _pass(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = b""
        try:
            async for part in self._exchange.parts():
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except ENDED:
            last = self._last_words()
        await send({"type": "http.response.body", "body": last})

    def _last_words(self) -> bytes:
        """Return the event of a stream that says that the process has ended.

        Raises:
            Disconnected: there is no way to say it but to end the connection.
        """
        error, kind = _ended(self._model), self.headers.get("content-type", "")
        if kind.startswith("text/event-stream"):
            return f"data: {json.dumps(error.body())}\n\n".encode()
        if kind.startswith("application/x-ndjson"):
            return f"{json.dumps({'error': error.message})}\n".encode()
        raise Disconnected


_PER_CONNECTION = (b"connection", b"keep-alive", b"transfer-encoding", b"date", b"x-request-id")


async def _read(request: Request) -> Asked:
    body = await request.body()
    if not body:
        return Asked()
    if len(body) > LARGE:
        parser: BodyParser = request.app.state.large_bodies
        return (await parser.parse(Asked, body, False))[0]
    return parse(Asked, body, False)[0]


def _ended(model: RoutedModel) -> ApiError:
    return ApiError(
        503,
        f"the process of the model {model.model_name!r} ended before its answer: ask again, which starts it",
        code="model_ended",
    )
