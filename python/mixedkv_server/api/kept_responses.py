"""Keeps responses, each as a session of its own, so that later ones can continue them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Path

from mixedkv.engine import Job
from mixedkv.ids import MAX_LENGTH, PATTERN
from mixedkv.sessions import CacheSessionMetadata, CreateContextCacheRequest
from mixedkv.sessions.records import MAX_MESSAGES, ErrorResponse
from mixedkv_server.api_error import ApiError, bad_request
from mixedkv_server.state import ServerState

_TTL = 24 * 3600  # seconds
_PREFIX = "resp_"
_PAGE = 1000  # sessions that are looked at together
ResponseId = Annotated[str, Path(max_length=MAX_LENGTH, pattern=f"^{PATTERN}$")]


async def history(
    server: ServerState, response_id: str | None, owner: str, param: str = "previous_response_id"
) -> list[dict[str, Any]]:
    """Return the messages up to and including a response, without instructions.

    Args:
        param: the request's field with the id.

    Raises:
        ApiError: 404, the response was not kept, has expired, or is another tenant's.
    """
    if response_id is None:
        return []
    found = await find(server, response_id, owner, param)
    return [message.model_dump(exclude_none=True) for message in found.messages or ()]


async def find(server: ServerState, response_id: str, owner: str, param: str) -> CacheSessionMetadata:
    """Return the session that a response is kept as. Raises as `history`."""
    found = None
    if response_id.startswith(_PREFIX):
        found = await server.contexts.get_session_metadata(response_id, tenant=owner)
    if found is None or found.messages is None:
        raise _unknown(response_id, param)
    return found


async def will_keep(
    server: ServerState, owner: str, requested: bool | None, messages: Sequence[dict[str, Any]]
) -> bool:
    """Return whether a response is kept, before any work is done: as `requested`, or by default if it can be.
    By default it takes the place of older ones where the tenant has no room.

    Raises:
        ApiError: what was asked for cannot be: 400, the chat is too long or about images; 429, the tenant has
            no room for it.
    """
    if requested is False:
        return False
    why = None
    if any(isinstance(message.get("content"), list) for message in messages):
        why = bad_request("store: a response about images is not kept: set it to false", "store")
    elif len(messages) >= MAX_MESSAGES:
        why = bad_request(f"store: a chat of {len(messages)} messages is too long: set it to false", "store")
    elif (full := await server.contexts.check_quota(owner)) and (
        requested or not await _oldest(server, owner)
    ):
        why = _no_room(full)
    if requested and why is not None:
        raise why
    return why is None


async def keep(
    server: ServerState,
    owner: str,
    response_id: str,
    requested: bool | None,
    messages: Sequence[dict[str, Any]],
    said: dict[str, Any],
    job: Job,
) -> None:
    """Keep a response for later requests.

    Args:
        said: the answer as a message.
        requested: None by default, which forgets older responses where the tenant has no room, or else this
            one.

    Raises:
        ApiError: 429, the tenant has no room for what it asked for.
    """
    whole = CreateContextCacheRequest.model_validate(
        {"model": server.model_name, "messages": [*messages, said], "ttl": _TTL, "session_id": response_id}
    )
    n_tokens = job.n_given + job.n_answer
    while True:
        kept = await server.contexts.register_session_cache(whole, tenant=owner, n_tokens=n_tokens)
        if not isinstance(kept, ErrorResponse):
            return
        if requested:
            raise _no_room(kept)
        if not await _forget_oldest(server, owner):
            return


async def _forget_oldest(server: ServerState, owner: str) -> bool:
    """Forget the tenant's oldest response; return False if that cannot be."""
    if not (oldest := await _oldest(server, owner)):
        return False
    gone = await server.contexts.unregister_session_cache(oldest, tenant=owner)
    return not isinstance(gone, ErrorResponse)


async def _oldest(server: ServerState, owner: str) -> str:
    """Return the id of the tenant's oldest response; "" if it has none."""
    kept, after = [], _PREFIX
    while page := await server.contexts.list_sessions(owner, after=after, limit=_PAGE):
        kept += [each for each in page if each.session_id.startswith(_PREFIX)]
        after = page[-1].session_id
        if not after.startswith(_PREFIX):
            break
    return min(kept, key=lambda each: each.expires_at).session_id if kept else ""  # all live as long


async def forget(server: ServerState, response_id: str, owner: str, param: str) -> None:
    """Forget a kept response. Raises as `history`."""
    await find(server, response_id, owner, param)
    gone = await server.contexts.unregister_session_cache(response_id, tenant=owner)
    if isinstance(gone, ErrorResponse):
        raise _unknown(response_id, param)


def _no_room(full: ErrorResponse) -> ApiError:
    return ApiError(429, full.detail, param="store", code=full.code)


def _unknown(response_id: str, param: str) -> ApiError:
    message = (
        f"response {response_id[:100]!r} is not kept here: ask for it with store=true, or send the whole "
        "history as input"
    )
    return ApiError(404, message, param=param, code="previous_response_not_found")
