"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

import re
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from mixedkv.engine.chat.chat_template import RenderedChat
from mixedkv.engine.jobs.answer_state import Delta, Done
from mixedkv.engine.jobs.job import Job
from mixedkv.engine.text.answer_reader import Part
from mixedkv.ids import new_id
from mixedkv.server.api.chat_jobs import chat_jobs, chat_tokens, translated
from mixedkv.server.api.message_schemas import CountRequest, MessagesRequest
from mixedkv.server.api.schemas import ChatFields, ChatRequest
from mixedkv.server.api.sse import SentAnswer, named_sse, respond
from mixedkv.server.api_error import ApiError
from mixedkv.server.http.json_body import JSONRoute
from mixedkv.server.state import ServerState, model_of, read_prompt, tenant

router = APIRouter(route_class=JSONRoute)

_TOO_LONG = re.compile(r"the prompt has (\d+) tokens, the context takes 1 to (\d+)")


@router.post("/v1/messages")
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Answer a chat, whole or as server-sent events."""
    owner = tenant(request)
    server = model_of(request, body.model)
    try:
        jobs, chat = await read_prompt(request, _jobs, server, body, owner)
    except ApiError as error:
        if any(each.role == "assistant" for each in body.messages):  # Claude Code then shortens its history
            error.message = _TOO_LONG.sub(r"prompt is too long: \1 tokens > \2 maximum", error.message)
        raise
    answer = _Answer(server, body, jobs[0], chat)
    return await respond(request, server, jobs, answer, stream=body.stream is True, large=False)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: Request) -> Response:
    """Count the tokens of a prompt."""
    server = model_of(request, body.model)
    return JSONResponse({"input_tokens": await read_prompt(request, _count, server, body)})


def _jobs(server: ServerState, body: MessagesRequest, owner: str) -> tuple[list[Job], RenderedChat]:
    return chat_jobs(server, translated(ChatRequest, body.as_chat()), owner, None)


def _count(server: ServerState, body: CountRequest) -> int:
    return len(chat_tokens(server, translated(ChatFields, body.fields())))


class _Answer(SentAnswer):
    """Builds Anthropic's objects for an answer to one request: blocks of thoughts, text and calls."""

    def __init__(self, server: ServerState, body: MessagesRequest, job: Job, chat: RenderedChat) -> None:
        self._body, self._job = body, job
        self._parts = chat.reader()
        self._block = -1  # the open block
        self._kind: tuple[str, int] | None = None
        self._head = {"id": new_id("msg"), "type": "message", "role": "assistant", "model": server.model_name}

    def whole(self, ends: list[Done]) -> dict[str, Any]:
        (end,) = ends
        self._parts.feed(end.text, last=end.last)
        return {**self._head, "content": self._content(), **self._stop(end), "usage": self._usage()}

    def first(self) -> bytes:
        stop = {"stop_reason": None, "stop_sequence": None}
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            **stop,
            "usage": {**self._usage(), "output_tokens": 0},
        }
        return named_sse({"type": "message_start", "message": message})

    def event(self, i: int, event: Delta | Done) -> bytes:
        out = b"".join(self._delta(part) for part in self._parts.feed(event.text, last=event.last))
        if not isinstance(event, Done):
            return out
        usage = self._usage()
        stop = {"type": "message_delta", "delta": self._stop(event), "usage": usage}
        return out + self._close() + named_sse(stop) + named_sse({"type": "message_stop"})

    def idle(self) -> bytes:
        return named_sse({"type": "ping"})

    def failed(self, error: ApiError) -> bytes:
        return named_sse({"type": "error", **error.body()})

    def _delta(self, part: Part) -> bytes:
        if part.index >= 0:
            kind, block = ("call", part.index), {
                "type": "tool_use", "id": part.id, "name": part.name, "input": {},
            }  # fmt: skip
            delta = {"type": "input_json_delta", "partial_json": part.arguments}
        elif part.reasoning:
            kind, block = ("thinking", 0), {"type": "thinking", "thinking": "", "signature": ""}
            delta = {"type": "thinking_delta", "thinking": part.reasoning}
        else:
            kind, block = ("text", 0), {"type": "text", "text": ""}
            delta = {"type": "text_delta", "text": part.content}
        out = b""
        if kind != self._kind:
            out = self._close()
            self._kind, self._block = kind, self._block + 1
            out += named_sse({"type": "content_block_start", "index": self._block, "content_block": block})
        return out + named_sse({"type": "content_block_delta", "index": self._block, "delta": delta})

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        self._kind = None
        return named_sse({"type": "content_block_stop", "index": self._block})

    def _content(self) -> list[dict[str, Any]]:
        answer = self._parts.answer
        blocks: list[dict[str, Any]] = []
        if answer.reasoning:
            blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.content:
            blocks.append({"type": "text", "text": answer.content})
        for call in answer.complete_calls:
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.values})
        return blocks

    def _stop(self, end: Done) -> dict[str, Any]:
        reason = self._parts.answer.finish_reason(end.reason)
        by = self._job.answer.text.stopped_by
        if reason != "length" and by in (self._body.stop_sequences or ()):
            return {"stop_reason": "stop_sequence", "stop_sequence": by}
        reason = {"tool_calls": "tool_use", "length": "max_tokens"}.get(reason, "end_turn")
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        """Return Anthropic's usage, whose input tokens do not include cached ones."""
        cached = self._job.n_cached_exact
        return {
            "input_tokens": self._job.n_given - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self._job.n_answer,
        }
