"""POST /api/chat and /api/generate: Ollama's API."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from mixedkv.engine.chat.chat_template import RenderedChat
from mixedkv.engine.jobs.answer_state import Delta, Done
from mixedkv.engine.jobs.job import Job
from mixedkv.server.api.chat_jobs import translated, translated_jobs
from mixedkv.server.api.completions import completion_jobs
from mixedkv.server.api.logprobs import chat_logprobs
from mixedkv.server.api.ollama_schemas import OllamaChat, OllamaGenerate, OllamaRequest
from mixedkv.server.api.schemas import CompletionRequest
from mixedkv.server.api.sse import NDJSON, SentAnswer, json_line, respond
from mixedkv.server.api_error import ApiError, bad_request
from mixedkv.server.described import Described
from mixedkv.server.http.json_body import PlainJSONRoute
from mixedkv.server.state import ServerState, model_of, read_prompt, tenant

router = APIRouter(route_class=PlainJSONRoute)
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
