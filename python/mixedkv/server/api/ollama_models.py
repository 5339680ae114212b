"""GET /api/tags, /api/ps, /api/version, POST /api/show, /api/embed, /api/embeddings: Ollama's API."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from mixedkv import __version__
from mixedkv.engine.embed.embedder import Embedder
from mixedkv.model.fingerprint import fingerprint
from mixedkv.server.api.chat_jobs import translated
from mixedkv.server.api.embeddings import checked_embedder, embed, input_tokens
from mixedkv.server.api.ollama import named_model, now, utc
from mixedkv.server.api.ollama_schemas import OllamaEmbed, OllamaEmbeddings, OllamaShow
from mixedkv.server.api.schemas import EmbeddingRequest
from mixedkv.server.described import Described
from mixedkv.server.http.json_body import PlainJSONRoute
from mixedkv.server.state import ServerState, in_thread, server_state, tenant

router = APIRouter(route_class=PlainJSONRoute)
_OLLAMA_VERSION = "0.12.11"  # the version whose fields these are; some clients refuse older ones
_NEVER = datetime(2999, 12, 31, 23, 59, 59, tzinfo=timezone.utc)
_MAX_VALUE = 10_000  # characters of a text in a file's metadata that are shown


@router.get("/api/version")
async def version(request: Request) -> Response:
    """Return the version of Ollama whose API this is."""
    tenant(request)
    return JSONResponse({"version": _OLLAMA_VERSION, "mixedkv": __version__})


@router.get("/api/tags")
async def tags(request: Request) -> Response:
    """List the models and adapters that are served."""
    tenant(request)
    return JSONResponse({"models": [await in_thread(_listed, each) for each in server_state(request).all]})


@router.get("/api/ps")
async def running(request: Request) -> Response:
    """List the models in memory, and when each is unloaded if no request comes."""
    tenant(request)
    models = [
        {
            **await in_thread(_listed, each),
            "expires_at": _expires_at(each.expires_in),
            "size_vram": 0,
            "context_length": each.facts["n_ctx"] or each.facts["embedding_n_ctx"],
        }
        for each in server_state(request).all
        if each.loaded
    ]
    return JSONResponse({"models": models})


def _expires_at(seconds: float) -> str:
    at = datetime.now(timezone.utc).timestamp() + seconds
    if at >= _NEVER.timestamp():
        return utc(_NEVER)
    return utc(datetime.fromtimestamp(at, timezone.utc))


@router.post("/api/show")
async def show(body: OllamaShow, request: Request) -> Response:
    """Return the metadata of a model's file, and its capabilities."""
    tenant(request)
    server = named_model(request, body.model or body.name, generates=False)
    return JSONResponse(await in_thread(_shown, server))


@router.post("/api/embed")
async def embed_inputs(body: OllamaEmbed, request: Request) -> Response:
    """Return a vector of length 1 for each input."""
    began, inputs = time.perf_counter(), [body.input] if isinstance(body.input, str) else body.input
    server = named_model(request, body.model, generates=False)
    if not any(inputs) and len(inputs) < 2:
        return JSONResponse({"model": server.model_name, "embeddings": []})
    vectors, n_tokens = await _embed(request, server, inputs, body.dimensions, body.truncate is not False)
    return JSONResponse(
        {
            "model": server.model_name,
            "embeddings": vectors,
            "total_duration": round(1e9 * (time.perf_counter() - began)),
            "load_duration": 0,
            "prompt_eval_count": n_tokens,
        }
    )


@router.post("/api/embeddings")
async def embed_prompt(body: OllamaEmbeddings, request: Request) -> Response:
    """Return a vector of length 1, in the form from before /api/embed."""
    server = named_model(request, body.model, generates=False)
    if not body.prompt:
        return JSONResponse({"embedding": []})
    (vector,), _ = await _embed(request, server, [body.prompt], None, True)
    return JSONResponse({"embedding": vector})


async def _embed(
    request: Request, server: ServerState, inputs: list[str], dimensions: int | None, truncate: bool
) -> tuple[list[list[float]], int]:
    owner = tenant(request)
    body = translated(EmbeddingRequest, {"input": inputs, "dimensions": dimensions or None})
    embedder = checked_embedder(server, body)
    read = _cut_tokens if truncate else input_tokens
    vectors, n_tokens = await embed(request, server, embedder, owner, read, body)
    return [vector.tolist() for vector in vectors], n_tokens


def _cut_tokens(server: ServerState, embedder: Embedder, body: EmbeddingRequest) -> list[list[int]]:
    return input_tokens(server, embedder, body, truncate=True)


def _listed(server: Described) -> dict[str, Any]:
    path, digest = server.path, ""
    with suppress(ValueError, OSError):  # the file may be gone or replaced until it is loaded
        digest = fingerprint(path)
    at = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc) if path.exists() else None
    return {
        "name": server.model_name,
        "model": server.model_name,
        "modified_at": at.isoformat() if at else now(),
        "size": server.facts["size_bytes"],
        "digest": digest,
        "details": _details(server),
    }


def _details(server: Described) -> dict[str, Any]:
    family = server.facts["architecture"]
    return {
        "parent_model": server.parent,
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": _short(server.facts["n_params"]),
        "quantization_level": server.facts["quantization"],
    }


def _shown(server: Described) -> dict[str, Any]:
    metadata = server.file_metadata()
    metadata.pop("tokenizer.chat_template", None)
    return {
        "modelfile": f"# served by mixedkv\nFROM {server.path.name}\n",
        "parameters": "",
        "template": server.chat_template,
        "license": str(metadata.get("general.license", "")),
        "details": _details(server),
        "model_info": {**_plain(metadata), "general.parameter_count": server.facts["n_params"]},
        "capabilities": server.capabilities,
        "modified_at": _listed(server)["modified_at"],
    }


def _plain(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata that are numbers or short texts."""
    return {
        key: value
        for key, value in metadata.items()
        if isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= _MAX_VALUE)
    }


def _short(n: int) -> str:
    """Return a number like 134515008 as 134.52M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if n >= size:
            return f"{n / size:.3g}{letter}" if n >= 100 * size else f"{n / size:.2f}{letter}"
    return str(n)
