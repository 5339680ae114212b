"""The ASGI application."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from mixedkv import __version__
from mixedkv.nearest_word import did_you_mean
from mixedkv.work.fair_pool import FairPool
from mixedkv.work.turns import unlimited
from mixedkv_server.api import chat_completions, completions, context, embeddings, info
from mixedkv_server.api_error import ApiError
from mixedkv_server.compat import APIS
from mixedkv_server.fields import place
from mixedkv_server.http.json_body import SaidOnce
from mixedkv_server.http.middleware import BodyLimit, OwnPagesOnly, ShortPaths
from mixedkv_server.pending import Disconnected
from mixedkv_server.pools import REST
from mixedkv_server.settings import ServerSettings
from mixedkv_server.snapshot import metrics_text
from mixedkv_server.state import ServerState, check_generates
from mixedkv_service.keys import Keys
from mixedkv_service.settings import in_words

log = logging.getLogger("mixedkv.server")

_DESCRIPTION = "OpenAI-compatible, with continuous batching, shared prefixes and conversations that are kept."
_MAX_PARAM = 200  # characters to quote, as names of unknown fields are the client's
_GONE = 499  # nginx' status for a client that disconnected; nobody reads it


_GENERATE = [  # endpoints that need a model which generates text
    *(module.router for module in (chat_completions, completions, context)),
    *(api.generating for api in APIS),
]
_OTHERS = [embeddings.router, info.router, *(api.others for api in APIS)]


def make_app(server: ServerState) -> FastAPI:
    """Return the application of a model and its adapters."""
    app = App(_lifespan)
    app.state.server, app.state.said = server, SaidOnce()
    app.state.metrics_text = SharedText(partial(metrics_text, server))
    include_endpoints(app)
    add_middleware(app, server.settings, server.keys, server.metrics.http)
    return app


def include_endpoints(app: FastAPI) -> None:
    """Add the endpoints of all APIs."""
    for router in _GENERATE:
        app.include_router(router, dependencies=[Depends(check_generates)])
    for router in _OTHERS:
        app.include_router(router)


def all_routes() -> list[APIRoute]:
    """Return the routes of all APIs."""
    routes = (route for router in (*_GENERATE, *_OTHERS) for route in router.routes)
    return [route for route in routes if isinstance(route, APIRoute)]


def add_middleware(app: FastAPI, settings: ServerSettings, keys: Keys, count: Any) -> None:
    """Add what stands around all endpoints: answers to errors, limits, keys, and who may call from where.
    `count` counts answers.
    """
    app.state.bodies = FairPool(1, "mixedkv-body", unlimited, REST)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Disconnected, _on_disconnect)
    app.add_exception_handler(OSError, _on_os_error)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(
        BodyLimit,
        max_bytes=int(settings.max_body_mb * 1e6),
        read_seconds=settings.read_timeout,
        seconds=settings.request_timeout,
        keys=keys,
        count=count,
    )
    origins = settings.origins
    if not keys:
        app.add_middleware(
            OwnPagesOnly,
            local_only=settings.local_only,
            hosts=settings.hosts,
            origins=origins,
        )
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "PATCH", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "x-ignored-fields"],
        )
    app.add_middleware(ShortPaths)


class App(FastAPI):
    """An application with our title, and without pages that load scripts from outside."""

    def __init__(self, lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> None:
        super().__init__(
            title="mixedkv",
            version=__version__,
            description=_DESCRIPTION,
            lifespan=lifespan,
            docs_url=None,
            redoc_url=None,
        )

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI schema. Unless the server is strict, bodies may have unknown fields."""
        schema = super().openapi()
        if not self.state.server.settings.strict:
            for each in schema["components"]["schemas"].values():
                each.pop("additionalProperties", None)
        return schema


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    server: ServerState = app.state.server
    server.delivery.begin()
    server.contexts.start()
    server.ready = True
    yield
    server.ready = False
    server.delivery.end()
    await server.contexts.close()


async def _on_api_error(request: Request, error: Any) -> Response:
    return error.response(request.url.path)  # type: ignore[no-any-return]


async def _on_invalid(request: Request, error: Any) -> Response:
    """Answer with the first error of an invalid request, without quoting it."""
    first = error.errors()[0]
    if first["loc"] == ("body",) and first["type"] == "missing":
        return ApiError(400, "the body is empty: send a JSON object", code="invalid_json").response(
            request.url.path
        )
    if first["loc"] == ("body",) and first["type"] in ("model_attributes_type", "model_type"):
        kind = request.headers.get("content-type", "")
        if "json" not in kind:
            return ApiError(
                400, "the body is not said to be JSON: send the header Content-Type: application/json"
            ).response()
        return ApiError(400, "the body is not a JSON object", code="invalid_json").response(request.url.path)
    message = in_words(first["msg"])
    param = place(first["loc"][1:])[:_MAX_PARAM] or None  # without "body", "path" or "query"
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON", code="invalid_json").response(request.url.path)
    return ApiError(400, f"{param}: {message}" if param else message, param=param).response(request.url.path)


_LONGEST_PATH = 60  # of a typing error
_OFTEN = tuple(
    "/v1/" + name
    for name in ["chat/completions", "completions", "responses", "messages", "embeddings", "models", "rerank"]
)


async def _on_http_error(request: Request, error: Any) -> Response:
    path, message = request.url.path, str(error.detail)
    if error.status_code == 404:
        known = _OFTEN if len(path) < _LONGEST_PATH else ()
        message = f"there is no {request.method} {path[:200]}{did_you_mean(path, ('', *known))}"
    elif error.status_code == 405:
        message = f"{request.method} does not go with {path}: use {error.headers['Allow']}"
    return ApiError(error.status_code, message, headers=error.headers).response(request.url.path)


async def _on_disconnect(_: Request, __: Any) -> Response:
    return Response(status_code=_GONE)


async def _on_os_error(_: Request, error: Any) -> Response:
    log.warning("a store is out of reach: %s", error)
    return ApiError(
        503, "the session store is out of reach: try again later", code="store_unavailable"
    ).response()


async def _on_bug(_: Request, error: Any) -> Response:
    log.error("a request failed: %s", type(error).__name__, exc_info=error)
    return ApiError(500, "the request failed inside the server; its log has more").response()


_REST = 10  # a text is kept so many times as long as making it took


class SharedText:
    """Makes a text once for all callers at the same time, and keeps it for a while.

    Args:
        make: returns the text, and the seconds of work that it took.
    """

    def __init__(
        self, make: Callable[[], Awaitable[tuple[bytes, float]]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._make, self._clock = make, clock
        self._task: asyncio.Task[bytes] | None = None
        self._good_until = 0.0

    async def get(self) -> bytes:
        task = self._task
        if task is None or (task.done() and self._clock() >= self._good_until):
            task = self._task = asyncio.get_running_loop().create_task(self._renew())
        return await asyncio.shield(task)  # a caller that is cancelled does not cancel the others

    async def _renew(self) -> bytes:
        self._good_until = 0.0
        text, seconds = await self._make()
        self._good_until = self._clock() + _REST * seconds
        return text
