"""POST and GET /v1/context, GET, PATCH and DELETE /v1/context/{id}, POST /v1/warm: prompts that are kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from mixedkv.engine import Chat, Job, RenderedChat
from mixedkv.engine import Request as EngineRequest
from mixedkv.ids import MAX_LENGTH, PATTERN
from mixedkv.sessions import CacheSessionMetadata, CreateContextCacheRequest
from mixedkv.sessions.records import MAX_TTL, ErrorResponse
from mixedkv.tokens import as_tokens, common_prefix
from mixedkv_server.api.chat_completions import ChatAnswer
from mixedkv_server.api.chat_jobs import chat_jobs
from mixedkv_server.api.completions import CompletionAnswer, completion_jobs
from mixedkv_server.api.engine_request import context_tokens
from mixedkv_server.api.openai_answer import OpenAIAnswer
from mixedkv_server.api.rendering import chat_of, render
from mixedkv_server.api.schemas import (
    ChatFields,
    ChatRequest,
    CompletionRequest,
    ContextPatch,
    ContextRequest,
    WarmRequest,
)
from mixedkv_server.api.sse import generated
from mixedkv_server.api_error import bad_request, prompt_error, session_error
from mixedkv_server.http.json_body import JSONRoute
from mixedkv_server.pending import PendingRequest, or_disconnect
from mixedkv_server.state import (
    ServerState,
    find_session,
    in_thread,
    model_of,
    read_prompt,
    server_state,
    tenant,
    time_left,
)

router = APIRouter(route_class=JSONRoute)
_TTL_HEADER = "x-session-ttl"
_MAX_RECORD_PER_TOKEN = 128  # characters
_MAX_PAGE = 1000  # sessions in a page of a list
SessionId = Annotated[str, Path(max_length=MAX_LENGTH, pattern=f"^{PATTERN}$")]


@router.post("/v1/context")
async def create_context(body: ContextRequest, request: Request) -> Response:
    """Evaluate a prompt and keep it under a session id for `ttl` seconds; with `max_tokens` answer it too.

    The header x-session-ttl says `ttl` too, and the answer's x-session-id the session, as AIBrix has them.
    """
    owner = tenant(request)
    server = model_of(request, body.model)
    if full := await server.contexts.check_quota(owner):
        raise session_error(full)
    # before anything is kept, as it can fail
    answer = {} if body.max_tokens is None else await _answer(request, server, body, owner)
    context = body.context if "ttl" in body.model_fields_set else _with_header_ttl(body.context, request)
    reference, seconds = server.contexts.new_kv_cache_ref(), server.settings.request_timeout
    job = await read_prompt(request, _context_job, server, context, owner, reference)
    try:
        with PendingRequest(server.engine, [job], seconds, time_left(request)) as pending:
            await or_disconnect(request, pending.done())
        created = await server.contexts.register_session_cache(
            context, None, reference, tenant=owner, n_tokens=job.n_prompt
        )
        if isinstance(created, ErrorResponse):
            raise session_error(created)
    except BaseException:  # what no session owns would outlive useful KV, and nobody could delete it
        await in_thread(server.session_kv.remove, session=reference, tenant=owner)
        raise
    return JSONResponse({**created.model_dump(), **answer}, 201, {"x-session-id": created.session_id})


def _with_header_ttl(context: CreateContextCacheRequest, request: Request) -> CreateContextCacheRequest:
    """Take `ttl` from the header, if the request has it."""
    given = request.headers.get(_TTL_HEADER)
    if given is None:
        return context
    if not (given.isascii() and given.isdigit() and len(given) < 10 and 1 <= int(given) <= MAX_TTL):
        raise bad_request(f"{_TTL_HEADER}: use a whole number of seconds from 1 to {MAX_TTL}", _TTL_HEADER)
    return context.model_copy(update={"ttl": int(given)})


async def _answer(request: Request, server: ServerState, body: ContextRequest, owner: str) -> dict[str, Any]:
    """Return `choices` and `usage` as the endpoints of answers have them."""
    fields = body.model_dump(include={"model", "max_tokens", "temperature", "seed"}, exclude_none=True)
    try:
        if body.messages is not None:
            messages = [message.model_dump(exclude_none=True) for message in body.messages]
            chat = ChatRequest.model_validate({**fields, "messages": messages})
            jobs = await read_prompt(request, chat_jobs, server, chat, owner)
            answer: OpenAIAnswer = ChatAnswer(server, chat, jobs)
        else:
            prompt = CompletionRequest.model_validate({**fields, "prompt": body.prompt})
            jobs = await read_prompt(request, completion_jobs, server, prompt, owner)
            answer = CompletionAnswer(server, prompt, jobs)
    except ValidationError as error:  # a message that can be kept but not answered
        places = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise RequestValidationError(places) from None
    ends = await generated(request, answer)
    whole = await server.pools.answers.run(owner, answer.whole, ends)
    return {"choices": whole["choices"], "usage": whole["usage"]}


@router.get("/v1/context")
async def list_contexts(
    request: Request,
    after: Annotated[str, Query(max_length=MAX_LENGTH, pattern=f"^({PATTERN})?$")] = "",
    limit: Annotated[int, Query(ge=1, le=_MAX_PAGE)] = 20,
) -> Response:
    """List the tenant's sessions in the order of their ids, a page at a time, and what all of them take."""
    server, owner = server_state(request), tenant(request)
    found = await server.contexts.list_sessions(owner, after=after, limit=limit + 1)
    held, quota = await server.contexts.held(owner), server.keys.session_quota(owner)
    sessions = [
        {
            "object": "context_cache",
            "session_id": item.session_id,
            "expires_at": int(item.expires_at),
            "bytes": item.nbytes,
        }
        for item in found[:limit]
    ]
    return JSONResponse(
        {
            "object": "list",
            "data": sessions,
            "has_more": len(found) > limit,
            "sessions": held.sessions,
            "bytes": held.nbytes,
            "max_sessions": quota.sessions,
            "max_bytes": quota.nbytes,
        }
    )


@router.get("/v1/context/{session_id}")
async def get_context(session_id: SessionId, request: Request) -> Response:
    """Return what is known of a session, without its prompt."""
    return JSONResponse(_describe(await find_session(server_state(request), session_id, tenant(request))))


@router.patch("/v1/context/{session_id}")
async def patch_context(session_id: SessionId, body: ContextPatch, request: Request) -> Response:
    """Keep a session for `ttl` seconds from now on."""
    renewed = await server_state(request).contexts.renew_session_cache(
        session_id, body.ttl, tenant=tenant(request)
    )
    if isinstance(renewed, ErrorResponse):
        raise session_error(renewed)
    return JSONResponse(_describe(renewed))


@router.delete("/v1/context/{session_id}")
async def delete_context(session_id: SessionId, request: Request) -> Response:
    """Forget a session and its KV in the store."""
    gone = await server_state(request).contexts.unregister_session_cache(session_id, tenant=tenant(request))
    if isinstance(gone, ErrorResponse):
        raise session_error(gone)
    return JSONResponse(gone.model_dump())


@router.post("/v1/warm")
async def warm(body: WarmRequest, request: Request) -> Response:
    """Evaluate a prompt now, so that requests that start with it find it."""
    owner = tenant(request)
    server = model_of(request, body.model)
    began, seconds = time.perf_counter(), server.settings.request_timeout
    job = await read_prompt(request, warm_job, server, body, owner)
    with PendingRequest(server.engine, [job], seconds, time_left(request)) as pending:
        await or_disconnect(request, pending.done())
    return JSONResponse(
        {
            "object": "warm",
            "model": server.model_name,
            "prompt_tokens": job.n_prompt,
            "cached_tokens": job.n_cached,
            "seconds": time.perf_counter() - began,
        }
    )


def warm_job(server: ServerState, body: WarmRequest, owner: str) -> Job:
    try:
        if body.messages is not None:
            if any(message.images for message in body.messages):
                raise bad_request("messages: images cannot be warmed: leave them out", "messages")
            chat = chat_of(
                server, ChatFields.model_validate({"messages": body.messages, "tools": body.tools})
            )
            tokens = _without_answer(chat, partial(render, server))
        else:
            assert body.prompt is not None
            tokens = server.engine.tokenizer.prompt(body.prompt)
    except ValueError as error:
        raise prompt_error(error, "prompt" if body.messages is None else "messages") from None
    return Job(EngineRequest(prompt=tokens, max_tokens=0, tenant=owner, keep=True))


def _context_job(server: ServerState, body: CreateContextCacheRequest, owner: str, reference: str) -> Job:
    try:
        _check_kept(body, server.engine.n_ctx)
        if body.messages is not None:
            messages = [message.model_dump(exclude_none=True) for message in body.messages]
            tokens = _without_answer(Chat(messages=messages), server.engine.tokenizer.render)
        else:
            tokens = context_tokens(server, body)
    except ValueError as error:
        raise prompt_error(error, "prompt" if body.messages is None else "messages") from None
    return Job(EngineRequest(prompt=tokens, max_tokens=0, tenant=owner, keep=True, session=reference))


def _check_kept(body: CreateContextCacheRequest, n_ctx: int) -> None:
    """Check that a session can be written and read again, before anything is evaluated. Templates may leave
    parts out, so a small prompt could have a large record.

    Raises:
        ValueError: it has half a surrogate pair or tool calls nested too deeply for pydantic, or is too
            large.
    """
    try:
        text = body.model_dump_json()
        CreateContextCacheRequest.model_validate_json(text)
    except ValueError:
        raise ValueError("text that is not Unicode, or tool_calls that are nested too deep") from None
    largest = _MAX_RECORD_PER_TOKEN * n_ctx
    if len(text) > largest:
        raise ValueError(f"{len(text)} characters are more than the {largest} that a context here can need")


def _without_answer(chat: Chat, tokenize: Callable[[Chat], tuple[list[int], RenderedChat]]) -> list[int]:
    """Return the part of a rendered chat that the next turn's prompt begins with, without the beginning of an
    answer.
    """
    tokens, _ = tokenize(chat)
    longer, _ = tokenize(replace(chat, messages=[*chat.messages, {"role": "user", "content": "?"}]))
    return tokens[: common_prefix(as_tokens(tokens), as_tokens(longer))] or tokens


def _describe(session: CacheSessionMetadata) -> dict[str, Any]:
    return {
        "object": "context_cache",
        "session_id": session.session_id,
        "model": session.model_id,
        "created": int(session.created),
        "ttl": session.ttl,
        "expires_at": int(session.expires_at),
        "n_tokens": session.n_tokens,
        "mode": session.mode,
        "version": session.version,
    }
