"""Ollama's API: POST /api/chat and /api/generate; of models that only embed too GET /api/tags, /api/ps,
/api/version, POST /api/show, /api/embed, /api/embeddings.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from mixedkv import __version__
from mixedkv.engine.chat.chat_template import RenderedChat
from mixedkv.engine.embed.embedder import Embedder
from mixedkv.engine.jobs.answer_state import Delta, Done
from mixedkv.engine.jobs.job import Job
from mixedkv.model.fingerprint import fingerprint
from mixedkv.server.api.chat_jobs import translated, translated_jobs
from mixedkv.server.api.completions import completion_jobs
from mixedkv.server.api.embeddings import checked_embedder, embed, input_tokens
from mixedkv.server.api.logprobs import chat_logprobs
from mixedkv.server.api.ollama_schemas import (
    OllamaChat,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaGenerate,
    OllamaRequest,
    OllamaShow,
)
from mixedkv.server.api.schemas import CompletionRequest, EmbeddingRequest
from mixedkv.server.api.sse import NDJSON, SentAnswer, json_line, respond
from mixedkv.server.api_error import ApiError, bad_request
from mixedkv.server.described import Described
from mixedkv.server.http.json_body import PlainJSONRoute
from mixedkv.server.state import ServerState, in_thread, model_of, read_prompt, server_state, tenant

router = APIRouter(route_class=PlainJSONRoute)
models_router = APIRouter(route_class=PlainJSONRoute)
_OLLAMA_VERSION = "0.12.11"  # the version whose fields these are; some clients refuse older ones
_NEVER = datetime(2999, 12, 31, 23, 59, 59, tzinfo=timezone.utc)
_MAX_VALUE = 10_000  # characters of a text in a file's metadata that are shown
_LATEST = ":latest"  # tag that Ollama's clients add to a name


@router.post("/api/chat")
async def chat(body: OllamaChat, request: Request) -> Response:
    """Answer a chat, as lines of JSON or whole."""
    return await _answer(request, body, is_empty=not body.messages)


@router.post("/api/generate")
async def generate(body: OllamaGenerate, request: Request) -> Response:
    """Answer a prompt, as lines of JSON or whole."""
    return await _answer(request, body, is_empty=not (body.prompt or body.suffix or body.images))


def named_model(request: Request, name: str | None, **options: Any) -> ServerState:
    """Return the model of a name as `model_of` does. The name may have Ollama's tag."""
    return model_of(request, name.removesuffix(_LATEST) if name else None, **options)


def now() -> str:
    return utc(datetime.now(timezone.utc))


def utc(at: datetime) -> str:
    return at.isoformat().replace("+00:00", "Z")


async def _answer(request: Request, body: OllamaChat | OllamaGenerate, is_empty: bool) -> Response:
    owner = tenant(request)
    if is_empty and body.keep_alive == 0:
        return _unload(request, body)
    server = named_model(request, body.model)
    if is_empty:  # this is how Ollama's clients load a model
        return without_answer(server, body, "load")
    if (n_ctx := body.wanted.num_ctx) is not None and n_ctx > server.engine.n_ctx:
        why = f"the context has {server.engine.n_ctx} tokens; serve with --n-ctx {n_ctx}"
        request.app.state.said.ignored_option(request.url.path, "options.num_ctx", why)
    jobs, rendered = await read_prompt(request, _jobs, server, body, owner)
    answer = _Answer(server, body, jobs[0], rendered)
    stream = body.stream is not False
    return await respond(request, server, jobs, answer, stream=stream, large=False, headers=NDJSON)


def _unload(request: Request, body: OllamaChat | OllamaGenerate) -> Response:
    """Answer a request to unload a model, which only the router of several models does."""
    server = named_model(request, body.model)
    why = "the model stays loaded; serve with --keep-alive"
    request.app.state.said.ignored_option(request.url.path, "keep_alive", why)
    return without_answer(server, body, "unload")


def without_answer(server: Described, body: OllamaChat | OllamaGenerate, reason: str) -> Response:
    whole = {"model": server.model_name, "created_at": now(), **_said(body, ""), "done": True}
    return JSONResponse({**whole, "done_reason": reason})


def _jobs(
    server: ServerState, body: OllamaChat | OllamaGenerate, owner: str
) -> tuple[list[Job], RenderedChat]:
    raw = isinstance(body, OllamaGenerate) and (body.is_raw or not server.engine.tokenizer.renders)
    if isinstance(body, OllamaGenerate) and raw:  # a base model continues the prompt as it is
        if body.format or body.images or body.logprobs:
            raise bad_request(
                "format, images and logprobs work in chats, and this is a base model, which continues texts: "
                "leave them out, or serve it with --chat-format chatml",
                "format",
            )
        fields = body.as_completion(server.engine.n_ctx)
        return completion_jobs(server, translated(CompletionRequest, fields), owner, None), RenderedChat(
            text=body.prompt
        )
    return translated_jobs(server, body.as_chat, owner)


def _said(
    body: OllamaRequest, text: str, thought: str = "", calls: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Return the fields for a piece of an answer, or for all of it."""
    more = {"thinking": thought} if thought else {}
    if not isinstance(body, OllamaChat):
        return {"response": text, **more}
    message = {"role": "assistant", "content": text, **more}
    return {"message": {**message, "tool_calls": calls} if calls else message}


class _Answer(SentAnswer):
    """Builds Ollama's objects for the answer to one request. Calls come at the end, each whole."""

    def __init__(
        self,
        server: ServerState,
        body: OllamaChat | OllamaGenerate,
        job: Job,
        chat: RenderedChat,
    ) -> None:
        self._server, self._body, self._job = server, body, job
        self._parts = chat.reader()

    def whole(self, ends: list[Done]) -> dict[str, Any]:
        (end,) = ends
        self._parts.feed(end.text, last=end.last)
        answer = self._parts.answer
        said = _said(self._body, answer.content, answer.reasoning, self._calls())
        return {**self._head(), **said, **self._logprobs(end), **self._end(end)}

    def event(self, i: int, event: Delta | Done) -> bytes:
        lines, logprobs = [], self._logprobs(event)
        for part in self._parts.feed(event.text, last=event.last):
            if part.index < 0:
                lines.append({**_said(self._body, part.content, part.reasoning), **logprobs})
                logprobs = {}
        if isinstance(event, Done):
            if calls := self._calls():
                lines.append(_said(self._body, "", calls=calls))
            lines.append({**_said(self._body, ""), **logprobs, **self._end(event)})
        elif logprobs:
            lines.append({**_said(self._body, ""), **logprobs})
        return b"".join(json_line({**self._head(), "done": False, **line}) for line in lines)

    def idle(self) -> bytes:
        """Return a line without text, since the format has no comments."""
        return json_line({**self._head(), "done": False, **_said(self._body, "")})

    def failed(self, error: ApiError) -> bytes:
        return json_line({"error": error.message})

    def _head(self) -> dict[str, Any]:
        return {"model": self._server.model_name, "created_at": now()}

    def _calls(self) -> list[dict[str, Any]]:
        return [
            {"id": call.id, "function": {"index": i, "name": call.name, "arguments": call.values}}
            for i, call in enumerate(self._parts.answer.complete_calls)
        ]

    def _logprobs(self, event: Delta | Done) -> dict[str, Any]:
        if not (self._body.logprobs and event.logprobs):
            return {}
        return {"logprobs": chat_logprobs(self._server.engine.detokenizer, event.logprobs)["content"]}

    def _reason(self, end: Done) -> str:
        """Return why the answer ended; calls are no reason in this API."""
        reason = self._parts.answer.finish_reason(end.reason)
        return "stop" if reason == "tool_calls" else reason

    def _end(self, end: Done) -> dict[str, Any]:
        """Return why the answer ended, its tokens, and times in nanoseconds."""
        job, at = self._job, time.perf_counter()
        first = job.t_first if job.t_first is not None else at
        return {
            "done": True,
            "done_reason": self._reason(end),
            "total_duration": _ns(at - job.t_submit),
            "load_duration": 0,
            "prompt_eval_count": job.n_given,
            "prompt_eval_duration": _ns(first - job.t_submit),
            "eval_count": job.n_answer,
            "eval_duration": _ns(at - first),
        }


def _ns(seconds: float) -> int:
    return max(0, round(1e9 * seconds))


@models_router.get("/api/version")
async def version(request: Request) -> Response:
    """Return the version of Ollama whose API this is."""
    tenant(request)
    return JSONResponse({"version": _OLLAMA_VERSION, "mixedkv": __version__})


@models_router.get("/api/tags")
async def tags(request: Request) -> Response:
    """List the models and adapters that are served."""
    tenant(request)
    return JSONResponse({"models": [await in_thread(_listed, each) for each in server_state(request).all]})


@models_router.get("/api/ps")
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


@models_router.post("/api/show")
async def show(body: OllamaShow, request: Request) -> Response:
    """Return the metadata of a model's file, and its capabilities."""
    tenant(request)
    server = named_model(request, body.model or body.name, generates=False)
    return JSONResponse(await in_thread(_shown, server))


@models_router.post("/api/embed")
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


@models_router.post("/api/embeddings")
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
