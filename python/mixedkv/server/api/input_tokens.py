"""POST /v1/chat/completions/input_tokens and /v1/responses/input_tokens: how many tokens a prompt has."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from mixedkv.server.api.chat_jobs import chat_tokens, translated
from mixedkv.server.api.kept_responses import history
from mixedkv.server.api.responses import ResponsesRequest
from mixedkv.server.api.schemas import ChatFields, ChatRequest
from mixedkv.server.http.json_body import JSONRoute
from mixedkv.server.state import ServerState, model_of, read_prompt, tenant

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/chat/completions/input_tokens")
async def of_chat(body: ChatRequest, request: Request) -> Response:
    """Count the tokens of a chat's prompt, without what its session has before it."""
    tenant(request)
    server = model_of(request, body.model)
    return _answer(await read_prompt(request, chat_tokens, server, body))


@router.post("/v1/responses/input_tokens")
async def of_response(body: ResponsesRequest, request: Request) -> Response:
    """Count the tokens of a response's prompt, with the history that it continues."""
    owner = tenant(request)
    server = model_of(request, body.model)
    before = await history(server, body.previous_response_id, owner)
    as_chat = partial(body.as_chat, [*before, *body.messages()])
    return _answer(await read_prompt(request, _tokens, server, as_chat))


def _tokens(server: ServerState, as_chat: Any) -> list[int]:
    fields = {name: value for name, value in as_chat().items() if name in ChatFields.model_fields}
    return chat_tokens(server, translated(ChatFields, fields))


def _answer(tokens: list[int]) -> Response:
    return JSONResponse({"object": "response.input_tokens", "input_tokens": len(tokens)})
