"""POST /v1/responses: OpenAI's Responses API."""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from mixedkv.engine.chat.chat_template import RenderedChat
from mixedkv.engine.jobs.answer_state import Delta, Done
from mixedkv.engine.jobs.job import Job
from mixedkv.engine.text.answer_reader import Part, ReadAnswer
from mixedkv.ids import new_id
from mixedkv.server.api.chat_jobs import translated_jobs
from mixedkv.server.api.kept_responses import ResponseId, find, history, keep, will_keep
from mixedkv.server.api.response_schemas import ResponsesRequest
from mixedkv.server.api.sse import SentAnswer, named_sse, respond
from mixedkv.server.api_error import ApiError
from mixedkv.server.http.json_body import JSONRoute
from mixedkv.server.state import ServerState, model_of, read_prompt, server_state, tenant

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/responses")
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Answer a list of items, whole or as server-sent events."""
    owner = tenant(request)
    server = model_of(request, body.model)
    before = await history(server, body.previous_response_id, owner)
    messages = [*before, *body.messages()]
    is_kept = await will_keep(server, owner, body.store, messages)
    as_chat = partial(body.as_chat, messages)
    jobs, chat = await read_prompt(request, translated_jobs, server, as_chat, owner)
    answer = _Answer(server, body, jobs[0], chat, is_kept)

    async def on_event(event: Delta | Done) -> None:
        answer.read(event)
        if isinstance(event, Done):
            await keep(server, owner, answer.id, body.store, messages, answer.answer, jobs[0])

    return await respond(
        request,
        server,
        jobs,
        answer,
        stream=body.stream is True,
        large=False,
        on_event=on_event if is_kept else None,
    )


@router.get("/v1/responses/{response_id}")
async def get_response(response_id: ResponseId, request: Request) -> Response:
    """Return a kept response, without usage, instructions and options, which are not kept."""
    kept = await find(server_state(request), response_id, tenant(request), "response_id")
    last = kept.messages[-1].model_dump(exclude_none=True) if kept.messages else {}
    return JSONResponse(
        {
            "id": response_id,
            "object": "response",
            "created_at": int(kept.created),
            "model": kept.model_id,
            "status": "completed",
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "output": _items(last),
            "parallel_tool_calls": True,
            "store": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": None,
        }
    )


def _items(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the items of an answer: thoughts, text and calls."""
    parts = [("reasoning", Part(reasoning=message.get("reasoning_content", "")))]
    parts.append(("message", Part(content=message.get("content", ""))))
    for i, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        part = Part(index=i, id=call["id"], name=function["name"], arguments=function["arguments"])
        parts.append(("function_call", part))
    items: list[dict[str, Any]] = []
    for kind, part in parts:
        output = _Output(kind, len(items), part)
        output.delta(part)
        if output.text or kind == "function_call":
            items.append(output.item("completed"))
    return items


class _Output:
    """An item of a streamed answer: its events, and the complete item at the end."""

    def __init__(self, kind: str, index: int, part: Part) -> None:
        self.kind, self.index = kind, index
        self.text = ""
        self.head: dict[str, Any]
        if kind == "reasoning":
            self.head = {"type": "reasoning", "id": new_id("rs"), "summary": []}
        elif kind == "message":
            self.head = {"type": "message", "id": new_id("msg"), "role": "assistant"}
        else:
            call = {"type": "function_call", "id": new_id("fc"), "call_id": part.id, "name": part.name}
            self.head = call

    def item(self, status: str) -> dict[str, Any]:
        if self.kind == "function_call":
            return {**self.head, "arguments": self.text, "status": status}
        content = [self._content()] if self.text or status != "in_progress" else []
        return {**self.head, "content": content, "status": status}

    def opened(self) -> list[dict[str, Any]]:
        out = [
            {
                "type": "response.output_item.added",
                "output_index": self.index,
                "item": self.item("in_progress"),
            }
        ]
        if self.kind == "message":
            out.append({"type": "response.content_part.added", **self._where(), "part": self._content()})
        return out

    def delta(self, part: Part) -> dict[str, Any]:
        text = part.arguments or part.reasoning or part.content
        self.text += text
        more: dict[str, Any] = {"logprobs": []} if self.kind == "message" else {}
        return {"type": f"response.{_NAMES[self.kind]}.delta", **self._where(), "delta": text, **more}

    def closed(self, status: str) -> list[dict[str, Any]]:
        name = f"response.{_NAMES[self.kind]}.done"
        out: list[dict[str, Any]] = []
        if self.kind == "function_call":
            out.append({"type": name, **self._where(), "name": self.head["name"], "arguments": self.text})
        else:
            more: dict[str, Any] = {"logprobs": []} if self.kind == "message" else {}
            out.append({"type": name, **self._where(), "text": self.text, **more})
        if self.kind == "message":
            out.append({"type": "response.content_part.done", **self._where(), "part": self._content()})
        item = self.item(status)
        return [*out, {"type": "response.output_item.done", "output_index": self.index, "item": item}]

    def _content(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def _where(self) -> dict[str, Any]:
        where = {"item_id": self.head["id"], "output_index": self.index}
        return where if self.kind == "function_call" else {**where, "content_index": 0}


_NAMES = {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}


class _Answer(SentAnswer):
    """Builds OpenAI's objects for the answer to one request: a list of items of thoughts, text and calls."""

    def __init__(
        self, server: ServerState, body: ResponsesRequest, job: Job, chat: RenderedChat, is_kept: bool
    ) -> None:
        self._body, self._job, self._sampling, self._is_kept = body, job, server.sampling, is_kept
        self._parts = chat.reader()
        self._read: deque[list[Part]] = deque()  # events that have not been sent yet
        self._outputs: list[_Output] = []
        self._open: tuple[str, int] | None = None
        self._n_events = 0
        self.id = new_id("resp")
        self._head = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": server.model_name,
        }

    @property
    def answer(self) -> ReadAnswer:
        """The answer as far as it has been read."""
        return self._parts.answer

    def read(self, event: Delta | Done) -> None:
        """Read an event before it is sent."""
        self._read.append(self._parts.feed(event.text, last=event.last))

    def _new(self, event: Delta | Done) -> list[Part]:
        return self._read.popleft() if self._read else self._parts.feed(event.text, last=event.last)

    def whole(self, ends: list[Done]) -> dict[str, Any]:
        (end,) = ends
        for part in self._new(end):
            self._take(part)
        return self._response(end)

    def first(self) -> bytes:
        response = self._response(None)
        return self._sse({"type": "response.created", "response": response}) + self._sse(
            {"type": "response.in_progress", "response": response}
        )

    def event(self, i: int, event: Delta | Done) -> bytes:
        out = b"".join(self._sse(chunk) for part in self._new(event) for chunk in self._take(part))
        if isinstance(event, Done):
            out += b"".join(map(self._sse, self._close(self._status(event))))
            response = self._response(event)
            out += self._sse({"type": f"response.{response['status']}", "response": response})
        return out

    def failed(self, error: ApiError) -> bytes:
        about = error.body()["error"]
        return self._sse(
            {"type": "error", "code": about["code"], "message": about["message"], "param": about["param"]}
        )

    def _sse(self, chunk: dict[str, Any]) -> bytes:
        chunk = {**chunk, "sequence_number": self._n_events}
        self._n_events += 1
        return named_sse(chunk)

    def _take(self, part: Part) -> list[dict[str, Any]]:
        kind = "function_call" if part.index >= 0 else "reasoning" if part.reasoning else "message"
        which, out = (kind, part.index), []
        if which != self._open:
            out += self._close("completed")
            self._open = which
            self._outputs.append(_Output(kind, len(self._outputs), part))
            out += self._outputs[-1].opened()
        return [*out, self._outputs[-1].delta(part)]

    def _close(self, status: str) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        self._open = None
        return self._outputs[-1].closed(status)

    def _response(self, end: Done | None) -> dict[str, Any]:
        """Return the response object; `end` is None while the answer is generated."""
        body, status = self._body, "in_progress" if end is None else self._status(end)
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        items = [output.item("completed") for output in self._outputs]
        if items and status == "incomplete":
            items[-1]["status"] = status
        effort = body.reasoning.effort if body.reasoning else None
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": why,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "output": items if end is not None else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": effort, "summary": None},
            "store": self._is_kept,
            "temperature": self._sampling["temperature"] if body.temperature is None else body.temperature,
            "text": self._text(),
            "tool_choice": self._choice(),
            "tools": [{"strict": None, **tool.model_dump(exclude_none=True)} for tool in body.tools or ()],
            "top_p": self._sampling["top_p"] if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": self._usage() if end is not None else None,
            "user": None,
            "metadata": body.metadata or {},
        }

    def _status(self, end: Done) -> str:
        return "incomplete" if self.answer.finish_reason(end.reason) == "length" else "completed"

    def _text(self) -> dict[str, Any]:
        form = self._body.text.format if self._body.text else None
        if form is None:
            return {"format": {"type": "text"}}
        return {"format": form.model_dump(exclude_none=True, by_alias=True)}

    def _choice(self) -> Any:
        choice = self._body.tool_choice or "auto"
        return choice if isinstance(choice, str) else choice.model_dump()

    def _usage(self) -> dict[str, Any]:
        job = self._job
        return {
            "input_tokens": job.n_given,
            "input_tokens_details": {"cached_tokens": job.n_cached_exact},
            "output_tokens": job.n_answer,
            "output_tokens_details": {"reasoning_tokens": job.n_thought},
            "total_tokens": job.n_given + job.n_answer,
        }
