"""GET /v1/models, /v1/stats, /health, /ready and /metrics."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from mixedkv.doors.keys import MetricsKey
from mixedkv.errors import ModelChangedError
from mixedkv.server.api_error import ApiError, from_engine
from mixedkv.server.described import Described
from mixedkv.server.snapshot import of_tenant, snapshot
from mixedkv.server.state import ServerState, model_of, server_state, tenant

router = APIRouter()


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
    return JSONResponse({"status": "ok"})


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
    """Refuse to call a server healthy whose engine is stuck.

    Raises:
        ApiError: 503.
    """
    if seconds := server.stuck_seconds:
        raise ApiError(
            503,
            f"the engine has made no step for {seconds:.0f} seconds, and work is waiting: restart the server",
            code="engine_stuck",
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
