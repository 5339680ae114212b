"""POST /v1/chat/completions and /v1/chat/completions/input_tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from mixedkv.engine import Delta, Done, Job
from mixedkv_server.api.chat_jobs import chat_jobs, chat_tokens
from mixedkv_server.api.growing import Turn, check_version, respond_in
from mixedkv_server.api.logprobs import chat_logprobs, prompt_logprobs
from mixedkv_server.api.openai_answer import OpenAIAnswer
from mixedkv_server.api.rendering import delta
from mixedkv_server.api.schemas import ChatRequest
from mixedkv_server.api.sse import sse
from mixedkv_server.api.usage import usage
from mixedkv_server.http.json_body import JSONRoute
from mixedkv_server.state import ServerState, adapter_of, find_session, model_of, read_prompt, tenant

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a chat, whole or as server-sent events."""
    owner = tenant(request)
    server = adapter_of(request, body.model, body.lora)
    session = await find_session(server, body.session_id, owner) if body.session_id else None
    if session is not None:
        check_version(body, session)
    turn = Turn.of_chat(server, body, session, body.messages)
    jobs = await read_prompt(request, chat_jobs, server, body, owner, session, session=session)
    return await respond_in(turn, request, ChatAnswer(server, body, jobs))


@router.post("/v1/chat/completions/input_tokens")
async def count_tokens(body: ChatRequest, request: Request) -> Response:
    """Count the tokens of a chat's prompt, without what its session has before it."""
    tenant(request)
    tokens = await read_prompt(request, chat_tokens, model_of(request, body.model), body)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": len(tokens)})


class ChatAnswer(OpenAIAnswer):
    """Builds OpenAI's objects for the answer to a chat."""

    chunk = "chat.completion.chunk"
    _body: ChatRequest

    def __init__(self, server: ServerState, body: ChatRequest, jobs: list[Job]) -> None:
        self._parts = [job.request.reader() for job in jobs]
        self._is_read = self._parts[0].is_parsed
        super().__init__(server, body, jobs, "chatcmpl", large=self._is_read)

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
        of_prompt = prompt_logprobs(self._token_texts, self.jobs[0])
        head = {**self._head, "object": "chat.completion", **of_prompt, **self._more(ends)}
        return {**head, "choices": choices, "usage": usage(self.jobs, self._n)}

    def first(self) -> bytes:
        roles = ({"role": "assistant", "content": "", **self._message_id(i)} for i in range(len(self.jobs)))
        return b"".join(sse(self._chunk(_choice(i, role))) for i, role in enumerate(roles))

    def _events(self, i: int, event: Delta | Done) -> bytes:
        if self._is_read:
            return b"".join(map(self._of_event, self._read_choices(i, event)))
        out = b""
        if event.logprobs or (event.text and self._body.timings_per_token):
            out = self._of_event(_choice(i, {"content": event.text}, self._logprobs(event)))
        elif event.text:
            out = self._template(i)(event.text)
        if isinstance(event, Done):
            out += self._of_event(_choice(i, {}, reason=event.reason))
        return out

    def takes_long(self, i: int) -> bool:
        return self._parts[i].takes_long

    def _read_choices(self, i: int, event: Delta | Done) -> Iterable[dict[str, Any]]:
        parts = self._parts[i].feed(event.text, last=event.last)
        logprobs = self._logprobs(event) if event.logprobs else None
        deltas = [delta(part) for part in parts] or ([{}] if logprobs else [])
        of = next((fields for fields in deltas if "content" in fields), deltas[-1] if deltas else None)
        for fields in deltas:
            yield _choice(i, fields, logprobs if fields is of else None)
        if isinstance(event, Done):
            yield _choice(i, {}, reason=self._parts[i].answer.finish_reason(event.reason))

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
            message["tool_calls"] = [call.message for call in answer.calls]
        return message

    def _choice_of(self, i: int, text: str) -> dict[str, Any]:
        return _choice(i, {"content": text} if text else {})

    def _message_id(self, i: int) -> dict[str, str]:
        return {"message_id": name} if (name := self.jobs[i].message_id) else {}

    def _logprobs(self, event: Delta | Done) -> Any:
        return chat_logprobs(self._token_texts, event.logprobs) if self._body.logprobs else None


def _choice(i: int, delta: Any, logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
    return {"index": i, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
