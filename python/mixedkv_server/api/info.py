"""Tells of the server itself: GET /v1/models, /v1/stats, /health, /ready, /metrics, its pages, and
/v1/cache/messages, the KV of messages by their ids.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi import Path as InPath
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, RedirectResponse, Response

from mixedkv import __version__
from mixedkv.errors import ModelChangedError
from mixedkv.ids import MAX_LENGTH, PATTERN
from mixedkv.store.results import MessageInfo
from mixedkv_server.api_error import ApiError, from_engine
from mixedkv_server.models import Described
from mixedkv_server.snapshot import of_tenant, snapshot
from mixedkv_server.state import ServerState, in_thread, model_of, server_state, tenant
from mixedkv_service.keys import MetricsKey

router = APIRouter()
MessageId = Annotated[str, InPath(max_length=MAX_LENGTH, pattern=f"^{PATTERN}$")]
_MAX_PAGE = 1000
_FOLDER = Path(__file__).parents[1] / "page"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_FILES = {path.name: path for path in _FOLDER.glob("*") if path.suffix in _KINDS}
_CHAT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'; "
)
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """List the models and adapters that are served, the default one first."""
    tenant(request)
    return JSONResponse({"object": "list", "data": [_model(each) for each in server_state(request).all]})


@router.get("/v1/models/{model:path}")
async def model(model: str, request: Request) -> Response:
    tenant(request)
    return JSONResponse(_model(model_of(request, model, generates=False, exact=True)))


@router.get("/v1/stats")
async def stats(request: Request, model: Annotated[str | None, Query(max_length=256)] = None) -> Response:
    """Return the contents of a model's cache by sequence and by layer, rates, and the latest requests without
    their text.
    """
    owner, server = tenant(request), model_of(request, model, generates=False)
    future = server.engine.call(lambda: snapshot(server))
    try:
        now: dict[str, Any] = await asyncio.wait_for(asyncio.wrap_future(future), 30)
    except Exception:
        raise ApiError(503, "the engine does not answer", code="engine_stopped") from None
    return JSONResponse(of_tenant(now, owner))


@router.get("/health")
async def health(request: Request) -> Response:
    """Answer 200 while the engines run and the model's file is unchanged."""
    for engine in server_state(request).engines:
        if isinstance(engine.closing_error, ModelChangedError):
            raise from_engine(engine.closing_error)
        if not engine.alive:
            raise ApiError(503, "the engine has stopped", code="engine_stopped")
    _check_steps(server_state(request))
    server = server_state(request)
    n = sum(engine.not_finite.n for engine in server.engines)
    about = {"version": __version__, "model": server.model_name}
    return JSONResponse({"status": "ok", **about, **({"not_finite_answers": n} if n else {})})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Answer 200 when requests are accepted: the model is loaded and warm, and the server is not shutting
    down.
    """
    server = server_state(request)
    engines = server.engines
    for error in (engine.closing_error for engine in engines):
        if isinstance(error, ModelChangedError):
            raise from_engine(error)
    if not (server.ready and all(engine.alive for engine in engines)):
        raise ApiError(503, "the server is starting or shutting down", code="not_ready")
    _check_steps(server)
    return JSONResponse({"status": "ready"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    check_metrics_key(server_state(request).metrics_key, request)
    return Response(await request.app.state.metrics_text.get(), media_type=CONTENT_TYPE_LATEST)


def check_metrics_key(key: MetricsKey | None, request: Request) -> None:
    """Check that a request has the key of the metrics.

    Raises:
        ApiError: 401, it has not.
    """
    headers = request.headers
    if key is not None and not key.opens(headers.get("authorization"), headers.get("x-api-key")):
        raise ApiError(
            401,
            "the metrics need their key: send the header `Authorization: Bearer KEY` with it",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _check_steps(server: ServerState) -> None:
    """Refuse to call a server healthy whose engine is stuck, or whose model gives no numbers.

    Raises:
        ApiError: 503.
    """
    if seconds := server.stuck_seconds:
        raise ApiError(
            503,
            f"the engine has made no step for {seconds:.0f} seconds, and work is waiting: restart the server",
            code="engine_stuck",
        )
    for engine in server.engines:
        if engine.not_finite.is_broken:
            raise ApiError(
                503,
                f"{engine.not_finite.n} answers ended since the model's values were not numbers, the latest "
                f"ones all: its file may be damaged; get it again and restart the server",
                code="not_finite",
            )


def _model(server: Described) -> dict[str, Any]:
    return {
        "id": server.model_name,
        "object": "model",
        "created": server.created,
        "owned_by": "mixedkv",
        **({"parent": server.parent} if server.parent else {}),
        "meta": {
            **server.facts,
            "kv": server.kv,
            "capabilities": server.capabilities,
            "chats": server.chats,
            "loaded": server.loaded,
        },
    }


@router.get("/v1/cache/messages")
async def list_messages(request: Request, limit: Annotated[int, Query(ge=1, le=_MAX_PAGE)] = 100) -> Response:
    """List the tenant's messages whose KV is stored, the latest first."""
    owner = tenant(request)
    found = await in_thread(server_state(request).session_kv.messages, owner, None)
    return JSONResponse(
        {
            "object": "list",
            "data": [_describe(info) for info in found[:limit]],
            "has_more": len(found) > limit,
        }
    )


@router.get("/v1/cache/messages/{message_id}")
async def get_message(message_id: MessageId, request: Request) -> Response:
    """Return the entries that a message ends in, with their size and age."""
    owner = tenant(request)
    found = await in_thread(server_state(request).session_kv.messages, owner, message_id)
    if not found:
        raise _unknown(message_id)
    return JSONResponse(
        {"object": "cached_message", "message_id": message_id, "entries": [_describe(info) for info in found]}
    )


@router.delete("/v1/cache/messages/{message_id}")
async def delete_message(message_id: MessageId, request: Request) -> Response:
    """Remove a message's KV from the store and from idle sequences, and all that builds on it."""
    owner = tenant(request)
    n = await in_thread(server_state(request).session_kv.remove_message, owner, message_id)
    if not n:
        raise _unknown(message_id)
    return JSONResponse(
        {"object": "cached_message.deleted", "message_id": message_id, "deleted": True, "entries": n}
    )


def _describe(info: MessageInfo) -> dict[str, Any]:
    return {
        "message_id": info.message_id,
        "entry": info.entry,
        "n_tokens": info.n_tokens,
        "bytes": info.nbytes,
        "created": int(info.created),
        "age_seconds": round(max(0.0, time.time() - info.created), 3),
        "used": int(info.used),
        "cache": info.label,
    }


def _unknown(message_id: str) -> ApiError:
    message = (
        f"message_id {message_id!r}: nothing is stored under it; KV is stored once an answer is done, by a "
        "server with --store"
    )
    return ApiError(404, message, param="message_id", code="message_not_found")


@router.get("/", include_in_schema=False)
async def chat_page(request: Request) -> Response:
    """Return the chat page, or the statistics if no model generates text."""
    if not any(each.generates for each in server_state(request).all):
        return RedirectResponse("stats")
    return _file("chat.html", _CHAT_POLICY)


@router.get("/stats", include_in_schema=False)
async def stats_page() -> Response:
    return _file("stats.html")  # the page's <meta> has the rest of its policy


@router.get("/docs", include_in_schema=False)
async def docs_page() -> Response:
    """Return the page that shows /openapi.json."""
    return _file("docs.html", _CHAT_POLICY)


@router.get("/page/{name}", include_in_schema=False)
async def page_file(name: str) -> Response:
    return _file(name if name.endswith((".css", ".js")) else "")


def _file(name: str, policy: str = "") -> Response:
    if name not in _FILES:
        raise ApiError(404, "the page has no such file")
    # not a FileResponse, which would also answer thousands of ranges
    path = _FILES[name]
    kind = f"{_KINDS[path.suffix]}; charset=utf-8"
    headers = {**_HEADERS, "Content-Security-Policy": policy + "frame-ancestors 'none'"}
    return Response(path.read_bytes(), media_type=kind, headers=headers)
