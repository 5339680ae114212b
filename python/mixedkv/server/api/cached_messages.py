"""GET /v1/cache/messages, GET and DELETE /v1/cache/messages/{id}: the KV of messages, by their ids."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import JSONResponse, Response

from mixedkv.ids import MAX_LENGTH, PATTERN
from mixedkv.server.api_error import ApiError
from mixedkv.server.state import in_thread, server_state, tenant
from mixedkv.store.results import MessageInfo

router = APIRouter()
MessageId = Annotated[str, Path(max_length=MAX_LENGTH, pattern=f"^{PATTERN}$")]
_MAX_PAGE = 1000


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
