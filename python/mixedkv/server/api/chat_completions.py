"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mixedkv.engine.chat.chat_template import RenderedChat
from mixedkv.engine.jobs.answer_state import Delta, Done
from mixedkv.engine.jobs.job import Job
from mixedkv.ids import new_id
from mixedkv.server.api.chat_jobs import chat_jobs
from mixedkv.server.api.generation import prompt_progress, usage
from mixedkv.server.api.growing import Turn, check_version, respond_with
from mixedkv.server.api.logprobs import chat_logprobs, prompt_logprobs
from mixedkv.server.api.schemas import ChatRequest
from mixedkv.server.api.sse import DONE, PING, Template, sse
from mixedkv.server.api.tools import call_json, delta
from mixedkv.server.api_error import ApiError
from mixedkv.server.http.json_body import JSONRoute
from mixedkv.server.state import ServerState, find_session, model_of, read_prompt, tenant

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a chat, whole or as server-sent events."""
    owner = tenant(request)
    server = model_of(request, body.model)
    session = await find_session(server, body.session_id, owner) if body.session_id else None
    if session is not None:
        check_version(body, session)
    turn = Turn.of_chat(server, body, session, body.messages)
    jobs, prompt = await read_prompt(request, chat_jobs, server, body, owner, session, session=session)
    if turn is not None:
        turn.chat = prompt
    answer = _Answer(server, body, jobs, prompt)
    large = bool(body.logprobs) or body.prompt_logprobs is not None or prompt.is_parsed
    return await respond_with(turn, body, request, server, jobs, answer, large=large)


class _Answer:
    """Builds OpenAI's objects for the answer to one request.

    Args:
        prompt: the rendered chat, which tells how answers are read.
    """

    def __init__(self, server: ServerState, body: ChatRequest, jobs: list[Job], prompt: RenderedChat) -> None:
        self._server, self._body, self._jobs = server, body, jobs
        self._is_read = prompt.is_parsed
        self._parts = [prompt.reader() for _ in jobs]
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._templates: dict[int, Template] = {}
        self._head = {
            "id": new_id("chatcmpl"),
            "created": int(time.time()),
            "model": server.model_name,
            "system_fingerprint": server.fingerprint,
        }

    def whole(self, ends: list[Done]) -> dict[str, Any]:
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", **self._content(i, end), **self._message_id(i)},
                "logprobs": self._logprobs(end),
                "finish_reason": self._parts[i].answer.finish_reason(end.reason),
            }
            for i, end in enumerate(ends)
        ]
        of_prompt = prompt_logprobs(self._server.engine.detokenizer, self._jobs[0].answer.prompt_logprobs)
        head = {**self._head, "object": "chat.completion", **of_prompt}
        return {**head, "choices": choices, "usage": self._usage()}

    def first(self) -> bytes:
        roles = ({"role": "assistant", "content": "", **self._message_id(i)} for i in range(len(self._jobs)))
        return b"".join(sse(self._chunk(i, role)) for i, role in enumerate(roles))

    def event(self, i: int, event: Delta | Done) -> bytes:
        if self._is_read:
            return b"".join(map(sse, self._read_chunks(i, event)))
        out = b""
        if event.logprobs:
            out = sse(self._chunk(i, {"content": event.text}, self._logprobs(event)))
        elif event.text:
            out = self._template(i)(event.text)
        if isinstance(event, Done):
            out += sse(self._chunk(i, {}, reason=event.reason))
        return out

    def idle(self) -> bytes:
        progress = prompt_progress(self._jobs[0]) if self._body.return_progress else None
        return PING if progress is None else sse({**self._chunk(0, {}), "prompt_progress": progress})

    def failed(self, error: ApiError) -> bytes:
        return sse(error.body())

    def last(self) -> bytes:
        if not self._include_usage:
            return DONE
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self._usage()}
        return sse(chunk) + DONE

    def _read_chunks(self, i: int, event: Delta | Done) -> Iterable[dict[str, Any]]:
        parts = self._parts[i].feed(event.text, last=event.last)
        logprobs = self._logprobs(event) if event.logprobs else None
        deltas = [delta(part) for part in parts] or ([{}] if logprobs else [])
        for fields in deltas:
            yield self._chunk(i, fields, logprobs)
            logprobs = None
        if isinstance(event, Done):
            yield self._chunk(i, {}, reason=self._parts[i].answer.finish_reason(event.reason))

    def _content(self, i: int, end: Done) -> dict[str, Any]:
        if not self._is_read:
            return {"content": end.text, "refusal": None}
        self._parts[i].feed(end.text, last=end.last)
        answer = self._parts[i].answer
        message: dict[str, Any] = {
            "content": answer.content or (None if answer.calls else ""),
            "refusal": None,
        }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [call_json(call) for call in answer.calls]
        return message

    def _template(self, i: int) -> Template:
        if i not in self._templates:
            self._templates[i] = Template(self._chunk(i, {"content": Template.MARK}))
        return self._templates[i]

    def _chunk(self, i: int, delta: Any, logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
        choice = {"index": i, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        return {**chunk, "usage": None} if self._include_usage else chunk

    def _message_id(self, i: int) -> dict[str, str]:
        return {"message_id": name} if (name := self._jobs[i].message_id) else {}

    def _logprobs(self, event: Delta | Done) -> Any:
        return chat_logprobs(self._server.engine.detokenizer, event.logprobs) if self._body.logprobs else None

    def _usage(self) -> dict[str, Any]:
        return usage(self._jobs, self._body.n or 1)
