"""POST /tokenize, /detokenize and /apply-template, as in llama-server."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from mixedkv.server.api.rendering import chat_of, rendered_text
from mixedkv.server.api.schemas import ApplyTemplateRequest, DetokenizeRequest, TokenizeRequest
from mixedkv.server.api_error import bad_request, prompt_error
from mixedkv.server.http.json_body import JSONRoute
from mixedkv.server.state import ServerState, model_of, read_prompt

router = APIRouter(route_class=JSONRoute)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Return the token ids of a text."""
    return await _answer(request, _tokens, body)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of token ids; control tokens are written out."""
    return await _answer(request, _text, body)


@router.post("/apply-template")
async def apply_template(body: ApplyTemplateRequest, request: Request) -> Response:
    """Return the text of the prompt that a chat is rendered to."""
    return await _answer(request, _prompt, body)


async def _answer(request: Request, make: Any, body: Any) -> Response:
    server = model_of(request, body.model)
    return JSONResponse(await read_prompt(request, make, server, body))


def _tokens(server: ServerState, body: TokenizeRequest) -> dict[str, Any]:
    try:
        tokens = server.engine.tokenizer.tokenize(
            body.content, start=body.add_special, special=body.parse_special
        )
    except ValueError as error:
        raise prompt_error(error, "content") from None
    if not body.with_pieces:
        return {"tokens": tokens}
    return {"tokens": [{"id": token, "piece": _piece(server, token)} for token in tokens]}


def _piece(server: ServerState, token: int) -> str | list[int]:
    """Return a token's text, or its bytes if these are not UTF-8."""
    name = server.engine.detokenizer.name(token)
    try:
        return name.decode("utf-8")
    except UnicodeDecodeError:
        return list(name)


def _text(server: ServerState, body: DetokenizeRequest) -> dict[str, Any]:
    try:
        tokens = server.engine.tokenizer.prompt(body.tokens)
    except ValueError as error:
        raise bad_request(str(error).replace("prompt:", "tokens:"), "tokens") from None
    text = b"".join(map(server.engine.detokenizer.name, tokens))
    return {"content": text.decode("utf-8", "replace")}


def _prompt(server: ServerState, body: ApplyTemplateRequest) -> dict[str, Any]:
    if any(message.images for message in body.messages):
        raise bad_request("messages: images have no text: leave them out", "messages")
    return {"prompt": rendered_text(server, chat_of(server, body))}
