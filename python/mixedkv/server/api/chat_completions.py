"""POST /v1/chat/completions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mixedkv.engine.constraint import Constraint
from mixedkv.engine.job import Delta, Done, Job
from mixedkv.engine.tool_chat import ToolPrompt
from mixedkv.server.api.generation import constraint_of, context_tokens, make_jobs, usage
from mixedkv.server.api.logprobs import chat_logprobs
from mixedkv.server.api.respond import respond
from mixedkv.server.api.schemas import ChatRequest
from mixedkv.server.api.sse import Template, sse
from mixedkv.server.api.tools import (
    ToolRequest,
    call_json,
    choice_of,
    delta,
    template_message,
    tool_request,
)
from mixedkv.server.api_error import bad_request, prompt_error
from mixedkv.server.http.json_body import JSONRoute
from mixedkv.server.state import (
    FINGERPRINT,
    ServerState,
    check_model,
    find_session,
    new_id,
    read_prompt,
    server_state,
    tenant,
)
from mixedkv.sessions import CacheSessionMetadata

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """An answer to a chat, whole or as server-sent events."""
    server, owner = server_state(request), tenant(request)
    check_model(server, body.model)
    session = await find_session(server, body.session_id, owner) if body.session_id else None
    jobs, prompt = await read_prompt(request, _jobs, server, body, owner, session, session=session)
    answer = _Answer(server, body, jobs, prompt)
    large = bool(body.logprobs) or prompt is not None
    return await respond(request, server, jobs, answer, stream=body.stream is True, large=large)


def _jobs(
    server: ServerState, body: ChatRequest, owner: str, session: CacheSessionMetadata | None
) -> tuple[list[Job], ToolPrompt | None]:
    """And how their answers are read, of a chat with tools."""
    tools = tool_request(body.messages, body.tools, choice_of(body))
    if tools is None:
        return _plain_jobs(server, body, owner, session), None
    if session is not None:
        raise bad_request(
            "tools, calls and their results do not go with session_id: leave one out", "session_id"
        )
    return _tool_jobs(server, body, owner, tools)


def _plain_jobs(
    server: ServerState, body: ChatRequest, owner: str, session: CacheSessionMetadata | None
) -> list[Job]:
    prefix: list[int] = []
    messages = [template_message(message) for message in body.messages]
    if session is not None and session.messages is not None:
        messages = [message.model_dump(exclude_none=True) for message in session.messages] + messages
    elif session is not None:
        prefix = context_tokens(server, session)
    try:
        tokens, stops = server.engine.tokenizer.chat(messages, start=not prefix)
    except ValueError as error:
        raise prompt_error(error, "messages") from None
    return _make(
        server, body, prefix + tokens, owner, constraint=_constraint(body), stops=stops, session=session
    )


def _tool_jobs(
    server: ServerState, body: ChatRequest, owner: str, request: ToolRequest
) -> tuple[list[Job], ToolPrompt]:
    tokens, prompt = request.tokens(server)
    jobs = _make(
        server,
        body,
        tokens,
        owner,
        constraint=prompt.constraint or _constraint(body),
        stops=prompt.stops,
        shown=server.engine.tokenizer.shown(prompt.shown),
    )
    return jobs, prompt


def _make(server: ServerState, body: ChatRequest, tokens: list[int], owner: str, **options: Any) -> list[Job]:
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    n_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return make_jobs(
        server,
        body,
        [tokens],
        owner=owner,
        max_tokens=max_tokens,
        n_logprobs=n_logprobs,
        param="messages",
        **options,
    )


def _constraint(body: ChatRequest) -> Constraint | None:
    wanted, other = body.response_format, constraint_of(body)
    if wanted is None or wanted.type == "text":
        return other
    if other is not None:
        raise bad_request(
            f"{other.name} and response_format both say what the answer looks like: give one", other.name
        )
    schema = wanted.json_schema.schema_ if wanted.json_schema is not None else wanted.schema_
    text = json.dumps({"type": "object"} if schema is None else schema)
    return Constraint("json_schema", text, "response_format")


class _Answer:
    """OpenAI's objects of one request.

    Args:
        prompt: of a chat with tools, says how its answers are read.
    """

    def __init__(
        self, server: ServerState, body: ChatRequest, jobs: list[Job], prompt: ToolPrompt | None
    ) -> None:
        self._server, self._body, self._jobs = server, body, jobs
        self._readers = [prompt.reader() for _ in jobs] if prompt is not None else []
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)
        # the answer's own name, by which a client may call it in the next turn
        self._ids = [new_id("msg") for _ in jobs] if body.use_kv_cache else None
        self._templates: dict[int, Template] = {}
        self._head = {
            "id": new_id("chatcmpl"),
            "created": int(time.time()),
            "model": server.model_name,
            "system_fingerprint": FINGERPRINT,
        }

    def whole(self, ends: list[Done]) -> dict[str, Any]:
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", **self._content(i, end), **self._message_id(i)},
                "logprobs": self._logprobs(end),
                "finish_reason": self._reason(i, end),
            }
            for i, end in enumerate(ends)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage()}

    def first(self) -> bytes:
        roles = ({"role": "assistant", "content": "", **self._message_id(i)} for i in range(len(self._jobs)))
        return b"".join(sse(self._chunk(i, role)) for i, role in enumerate(roles))

    def event(self, i: int, event: Delta | Done) -> bytes:
        if self._readers:
            return b"".join(map(sse, self._tool_chunks(i, event)))
        out = b""
        if event.logprobs:
            out = sse(self._chunk(i, {"content": event.text}, self._logprobs(event)))
        elif event.text:
            out = self._template(i)(event.text)
        if isinstance(event, Done):
            out += sse(self._chunk(i, {}, reason=event.reason))
        return out

    def last(self) -> bytes:
        if not self._include_usage:
            return b""
        return sse({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self._usage()})

    def _tool_chunks(self, i: int, event: Delta | Done) -> Iterable[dict[str, Any]]:
        parts = self._readers[i].feed(event.text, last=isinstance(event, Done))
        logprobs = self._logprobs(event) if event.logprobs else None
        deltas = [delta(part) for part in parts] or ([{}] if logprobs else [])
        for fields in deltas:
            yield self._chunk(i, fields, logprobs)
            logprobs = None
        if isinstance(event, Done):
            yield self._chunk(i, {}, reason=self._reason(i, event))

    def _content(self, i: int, end: Done) -> dict[str, Any]:
        if not self._readers:
            return {"content": end.text, "refusal": None}
        self._readers[i].feed(end.text, last=True)
        answer = self._readers[i].answer
        message: dict[str, Any] = {
            "content": answer.content or (None if answer.calls else ""),
            "refusal": None,
        }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [call_json(call) for call in answer.calls]
        return message

    def _reason(self, i: int, end: Done) -> str:
        called = bool(self._readers) and bool(self._readers[i].answer.calls)
        return "tool_calls" if called and end.reason == "stop" else end.reason

    def _template(self, i: int) -> Template:
        if i not in self._templates:
            self._templates[i] = Template(self._chunk(i, {"content": Template.MARK}))
        return self._templates[i]

    def _chunk(self, i: int, delta: Any, logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
        choice = {"index": i, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        return {**chunk, "usage": None} if self._include_usage else chunk

    def _message_id(self, i: int) -> dict[str, str]:
        return {} if self._ids is None else {"message_id": self._ids[i]}

    def _logprobs(self, event: Delta | Done) -> Any:
        return chat_logprobs(self._server.engine.detokenizer, event.logprobs) if self._body.logprobs else None

    def _usage(self) -> dict[str, Any]:
        return usage(self._jobs, self._body.n or 1)
