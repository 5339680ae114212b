"""GET /props and /lora-adapters, POST /tokenize and /detokenize as llama-server has them, of any model; and
/apply-template.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from mixedkv import __version__
from mixedkv.server.api.llama_server import MEDIA_MARKER
from mixedkv.server.api.rendering import chat_of, rendered_text
from mixedkv.server.api.schemas import ApplyTemplateRequest, DetokenizeRequest, TokenizeRequest
from mixedkv.server.api_error import bad_request, prompt_error
from mixedkv.server.http.json_body import JSONRoute
from mixedkv.server.packing import Long
from mixedkv.server.state import ServerState, adapters, model_of, packed_answer, read_prompt, tenant

router = APIRouter(route_class=JSONRoute)
template_router = APIRouter(route_class=JSONRoute)


@router.get("/props")
async def props(request: Request, model: Annotated[str | None, Query(max_length=256)] = None) -> Response:
    """Return the properties that llama-server's clients ask for first: context, template, defaults."""
    tenant(request)
    server = model_of(request, model, generates=False)
    n_ctx = server.facts["n_ctx"] or server.facts["embedding_n_ctx"]
    settings = {"n_ctx": n_ctx, "params": {**server.sampling, "n_predict": -1}}
    return JSONResponse(
        {
            "default_generation_settings": settings,
            "total_slots": server.settings.parallel,
            "model_alias": server.model_name,
            "model_path": server.path.name,
            "chat_template": server.chat_template,
            "modalities": {"vision": "vision" in server.capabilities, "audio": False},
            "media_marker": MEDIA_MARKER,
            "is_sleeping": False,
            "build_info": f"mixedkv-{__version__}",
        }
    )


@router.get("/lora-adapters")
async def lora_adapters(
    request: Request, model: Annotated[str | None, Query(max_length=256)] = None
) -> Response:
    """List a model's adapters by the ids that `lora` of a request takes, with their strengths."""
    tenant(request)
    model_of(request, model, generates=False)
    fields = (
        {"path": each.adapter, "scale": each.scale, "name": each.model_name} for each in adapters(request)
    )
    return JSONResponse([{"id": i, **each} for i, each in enumerate(fields)])


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Return the token ids of a text."""
    return await _answer_tokens(request, _tokens, body)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of token ids; control tokens are written out."""
    return await _answer_tokens(request, _text, body)


@template_router.post("/apply-template")
async def apply_template(body: ApplyTemplateRequest, request: Request) -> Response:
    """Return the text of the prompt that a chat is rendered to."""
    return await _answer_tokens(request, _prompt, body)


async def _answer_tokens(request: Request, make: Any, body: Any) -> Response:
    tenant(request)
    server = model_of(request, body.model, generates=make is _prompt)
    found = await read_prompt(request, make, server, body)
    return await packed_answer(request, server, lambda: found)


def _tokens(server: ServerState, body: TokenizeRequest) -> dict[str, Any]:
    try:
        tokens = server.engine.tokenizer.tokenize(
            body.content, start=body.add_special, special=body.parse_special
        )
    except ValueError as error:
        raise prompt_error(error, "content") from None
    if not body.with_pieces:
        return {"tokens": Long(tokens)}
    return {"tokens": Long({"id": token, "piece": _piece(server, token)} for token in tokens)}


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
