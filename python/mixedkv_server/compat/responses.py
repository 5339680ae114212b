"""POST /v1/responses: OpenAI's Responses API. Bodies become chats."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Discriminator, Field, Tag, model_validator
from starlette.responses import JSONResponse, Response

from mixedkv.engine import Delta, Done, Job, Part
from mixedkv.ids import new_id
from mixedkv_server.api.chat_jobs import chat_tokens, translated, translated_jobs
from mixedkv_server.api.kept_responses import ResponseId, find, forget, history, keep, will_keep
from mixedkv_server.api.schemas import (
    ChatFields,
    Metadata,
    RefusalPart,
    StreamOptions,
    TextOnly,
    TextOrImages,
    TextPart,
)
from mixedkv_server.api.sse import PING, SentAnswer, named_sse, respond
from mixedkv_server.api.usage import PromptProgress, cached_details, timings
from mixedkv_server.api_error import ApiError
from mixedkv_server.compat.foreign_api import ForeignAPI
from mixedkv_server.fields import (
    LIST,
    OBJECT,
    REFUSED,
    TEXT,
    TEXT_OR_LIST,
    CallId,
    Filtered,
    Finite,
    FunctionName,
    Id,
    MessageList,
    Model,
    Name,
    Positive,
    Text,
    TextOrList,
    ToolList,
    TopLogprobs,
    WithoutHosted,
    about,
    ignored,
    one_of,
    ranged,
)
from mixedkv_server.http.json_body import JSONRoute
from mixedkv_server.pools import LARGE
from mixedkv_server.state import ServerState, model_of, read_prompt, server_state, tenant


class OutputText(Model):
    type: Literal["output_text"]
    text: Text
    annotations: Annotated[list[Any], Field(max_length=1000)] | None = None
    logprobs: list[Any] | None = None


class InputImage(Model):
    type: Literal["input_image"]
    image_url: Text
    detail: Name | None = ignored()


def _part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", "")
    return f"~{kind}" if kind in ("output_text", "refusal", "input_image") else "~text"


AnyPart = Annotated[
    Annotated[OutputText, Tag("~output_text")]
    | Annotated[RefusalPart, Tag("~refusal")]
    | Annotated[TextPart, Tag("~text")]
    | Annotated[InputImage, Tag("~input_image")],
    Discriminator(_part),
]


class Item(Model):
    id: Name | None = None
    status: Name | None = None


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[TextOrList[AnyPart], TextOrImages]
    phase: Name | None = None

    @model_validator(mode="after")
    def _only_users_show_images(self) -> MessageItem:
        if self.role != "user" and any(isinstance(part, InputImage) for part in self.content):
            raise ValueError(f"content: an image in a message of role {self.role}: send it as user")
        return self


class CallItem(Item):
    type: Literal["function_call"]
    call_id: CallId
    name: Name
    arguments: Text
    namespace: None = None
    caller: Any = None


class ResultItem(Item):
    type: Literal["function_call_output"]
    call_id: CallId
    output: Annotated[TextOrList[TextPart], TextOnly]


class ReasoningText(Model):
    type: Literal["reasoning_text", "summary_text"]
    text: Text


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    encrypted_content: Text | None = None


def _kind(item: Any) -> str:
    """Return the tag of an item's type; an item without one is a message."""
    return f"~{item.get('type', 'message') if isinstance(item, dict) else getattr(item, 'type', 'message')}"


AnyItem = Annotated[
    Annotated[MessageItem, Tag("~message")]
    | Annotated[CallItem, Tag("~function_call")]
    | Annotated[ResultItem, Tag("~function_call_output")]
    | Annotated[ReasoningItem, Tag("~reasoning")],
    Discriminator(_kind),
]


class FunctionTool(Model):
    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedChoice(Model):
    type: Literal["function"]
    name: Name


class TextFormat(Model):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Model):
    format: TextFormat | None = None
    verbosity: Name | None = ignored()


class Reasoning(Model):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Name | None = None
    generate_summary: Name | None = None


_KINDS = (None, "message", "function_call", "function_call_output", "reasoning")  # of items


_MANY_TOOLS = 16


class ResponsesRequest(WithoutHosted):
    model: Name | None = None
    input: Annotated[Annotated[Text, TEXT] | Annotated[MessageList[AnyItem], LIST], TEXT_OR_LIST]
    instructions: Text | None = None
    max_output_tokens: Positive | None = None
    temperature: Finite | None = ranged("temperature")
    top_p: Finite | None = ranged("top_p")
    tools: ToolList[FunctionTool] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], TEXT] | Annotated[NamedChoice, OBJECT],
            one_of("none, auto, required, or a function"),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = about(
        "Kept for a day, for previous_response_id; default: true, in place of the oldest one "
        "where there is no room.",
    )
    metadata: Metadata | None = None
    user: Name | None = ignored()
    safety_identifier: Name | None = ignored()
    service_tier: Name | None = ignored()
    prompt_cache_key: Name | None = ignored()
    prompt_cache_retention: Name | None = ignored()
    include: Annotated[list[Name], Field(max_length=20)] | None = ignored()
    truncation: Literal["auto", "disabled"] | None = about(
        "auto: the middle goes of what does not fit; default: the server's `--overflow`."
    )
    max_tool_calls: Positive | None = ignored()
    timings_per_token: bool | None = about("`timings`, as llama-server has them, in the stream's events.")
    return_progress: bool | None = about("A stream says how far its prompt is.")
    previous_response_id: Id | None = about("Of a response that is kept: its history goes before the input.")
    # known, but not what this server does: see `_refuse_unsupported`
    conversation: Any = about(REFUSED)
    background: bool | None = about(REFUSED)
    prompt: Any = about(REFUSED)
    top_logprobs: TopLogprobs | None = about(REFUSED)

    @classmethod
    def drop_hosted(cls, body: dict[str, Any], filtered: Filtered) -> dict[str, Any]:
        _refuse_references(body.get("input"))
        for name, where, kinds in (("tools", "tools[]", ("function",)), ("input", "input[]", _KINDS)):
            if name in body:
                given, body[name] = body[name], filtered.of(where, body[name], kinds)
                if name == "input" and given and not body[name]:
                    raise ValueError(
                        "input: no item is of a type that this server has: give a message, function_call, "
                        "function_call_output or reasoning"
                    )
        choice = body.get("tool_choice")
        if isinstance(choice, dict) and choice.get("type") != "function":
            filtered.dropped.append("tool_choice")
            del body["tool_choice"]
        return body

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> ResponsesRequest:
        if self.conversation is not None:
            raise ValueError(
                "conversation is not supported by this server: use store and previous_response_id, or send "
                "the whole history as input"
            )
        for name in ("background", "prompt", "top_logprobs"):
            if getattr(self, name):
                raise ValueError(f"{name} is not supported by this server: leave it out")
        return self

    @property
    def is_large(self) -> bool:
        """True if the fields that its answer repeats may take more than a millisecond or two to encode."""
        return len(self.instructions or "") > LARGE or len(self.tools or ()) > _MANY_TOOLS

    def as_chat(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the request as a chat of these messages."""
        choice, system = self.tool_choice, {"role": "system", "content": self.instructions}
        same = ("temperature", "top_p", "parallel_tool_calls", "stream", "return_progress")
        return {
            **{name: getattr(self, name) for name in same},
            "messages": [system, *messages] if self.instructions else messages,
            "max_completion_tokens": self.max_output_tokens,
            "tools": [_function(tool.model_dump(exclude={"type"})) for tool in self.tools or ()] or None,
            "tool_choice": _function({"name": choice.name}) if isinstance(choice, NamedChoice) else choice,
            "response_format": _format(self.text.format) if self.text and self.text.format else None,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "overflow": {"auto": "slide", "disabled": "refuse"}.get(self.truncation or ""),
        }

    def messages(self) -> Iterable[dict[str, Any]]:
        """Yield the input as the messages of a chat: an assistant's thoughts, text and calls are one."""
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        for is_answer, items in groupby(self.input, _is_of_an_answer):
            if is_answer:
                yield _answer(items)
            else:
                yield from map(_said, items)


def _refuse_references(items: Any) -> None:
    """Refuse items that stand for others: an answer without those would be about something else."""
    for i, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict) and item.get("type") == "item_reference":
            raise ValueError(
                f"input.{i}: item_reference is not supported by this server: give a message, function_call, "
                f"function_call_output or reasoning itself, or previous_response_id"
            )


def _is_of_an_answer(item: Any) -> bool:
    return not isinstance(item, ResultItem) and getattr(item, "role", "assistant") == "assistant"


def _said(item: Any) -> dict[str, Any]:
    if isinstance(item, ResultItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
    return {"role": item.role, "content": _content(item.content)}


def _answer(items: Iterable[Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"role": "assistant", "content": ""}
    for item in items:
        if isinstance(item, MessageItem):
            answer["content"] += _text(item.content)
        elif isinstance(item, CallItem):
            call = _function({"name": item.name, "arguments": item.arguments})
            answer.setdefault("tool_calls", []).append({"id": item.call_id, **call})
        else:
            text = "".join(part.text for part in item.content or item.summary or ())
            answer["reasoning_content"] = answer.get("reasoning_content", "") + text
    return answer


def _content(content: Any) -> Any:
    if isinstance(content, str) or not any(isinstance(part, InputImage) for part in content):
        return _text(content)
    return [
        {"type": "image_url", "image_url": {"url": part.image_url}}
        if isinstance(part, InputImage)
        else {"type": "text", "text": part.text}
        for part in content
    ]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _function(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function}


def _format(requested: TextFormat) -> dict[str, Any]:
    if requested.type != "json_schema":
        return {"type": requested.type}
    return {
        "type": "json_schema",
        "json_schema": {"name": requested.name or "schema", "schema": requested.schema_},
    }


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
    jobs = await read_prompt(request, translated_jobs, server, as_chat, owner)
    answer = _Answer(server, body, jobs, is_kept)

    async def on_event(event: Delta | Done) -> None:
        answer.read(event)
        if isinstance(event, Done):
            await keep(server, owner, answer.id, body.store, messages, answer.message, jobs[0])

    return await respond(request, answer, on_event if is_kept else None)


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


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: ResponseId, request: Request) -> Response:
    """Delete a kept response."""
    await forget(server_state(request), response_id, tenant(request), "response_id")
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/input_tokens")
async def count_tokens(body: ResponsesRequest, request: Request) -> Response:
    """Count the tokens of a response's prompt, with the history that it continues."""
    owner = tenant(request)
    server = model_of(request, body.model)
    before = await history(server, body.previous_response_id, owner)
    as_chat = partial(body.as_chat, [*before, *body.messages()])
    tokens = await read_prompt(request, _tokens, server, as_chat)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": len(tokens)})


def _tokens(server: ServerState, as_chat: Any) -> list[int]:
    fields = {name: value for name, value in as_chat().items() if name in ChatFields.model_fields}
    return chat_tokens(server, translated(ChatFields, fields))


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

    def __init__(self, server: ServerState, body: ResponsesRequest, jobs: list[Job], is_kept: bool) -> None:
        self._body, (self._job,), self._is_kept = body, jobs, is_kept
        self._parts = self._job.request.reader()
        super().__init__(
            server,
            jobs,
            streams=body.stream is True,
            progress=bool(body.return_progress),
            large=self._parts.is_parsed or body.is_large,
        )
        self._unsent: deque[list[Part]] = deque()  # events that have not been sent yet
        self._outputs: list[_Output] = []
        self._open: tuple[str, int] | None = None  # kind and index of the last output while it grows
        self._n_events = 0
        self._progress = PromptProgress(self._job, body.return_progress)
        self.id = new_id("resp")
        self._head = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": server.model_name,
        }

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message for the history, with the calls that ended."""
        answer = self._parts.answer
        calls = [call.message for call in answer.complete_calls]
        return {**answer.message, **({"tool_calls": calls} if calls else {})}

    def read(self, event: Delta | Done) -> None:
        """Read an event before it is sent."""
        self._unsent.append(self._parts.feed(event.text, last=event.last))

    def _new(self, event: Delta | Done) -> list[Part]:
        return self._unsent.popleft() if self._unsent else self._parts.feed(event.text, last=event.last)

    def whole(self, ends: list[Done]) -> dict[str, Any]:
        (end,) = ends
        for part in self._new(end):
            self._take(part)
        timed = {"timings": timings(self._job)} if self._body.timings_per_token else {}
        return {**self._response(end), **timed}

    def first(self) -> bytes:
        response = self._response(None)
        return self._sse({"type": "response.created", "response": response}) + self._sse(
            {"type": "response.in_progress", "response": response}
        )

    def takes_long(self, i: int) -> bool:
        return self._body.is_large or self._parts.takes_long

    def event(self, i: int, event: Delta | Done) -> bytes:
        timed = {"timings": timings(self._job)} if self._body.timings_per_token else {}
        chunks = [chunk for part in self._new(event) for chunk in self._take(part)]
        out = b"".join(map(self._of_prompt, self._progress.done()))
        out += b"".join(self._sse({**each, **(timed if "delta" in each else {})}) for each in chunks)
        if isinstance(event, Done):
            out += b"".join(map(self._sse, self._close(self._status(event))))
            response = self._response(event)
            out += self._sse({"type": f"response.{response['status']}", "response": response, **timed})
        return out

    def idle(self) -> bytes:
        progress = self._progress.now()
        return PING if progress is None else self._of_prompt(progress)

    def _of_prompt(self, progress: dict[str, Any]) -> bytes:
        event = {"type": "response.in_progress", "response": self._response(None)}
        return self._sse({**event, "prompt_progress": progress})

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
            "temperature": self.server.sampling["temperature"]
            if body.temperature is None
            else body.temperature,
            "text": self._text(),
            "tool_choice": self._choice(),
            "tools": [{"strict": None, **tool.model_dump(exclude_none=True)} for tool in body.tools or ()],
            "top_p": self.server.sampling["top_p"] if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": self._usage() if end is not None else None,
            "user": None,
            "metadata": body.metadata or {},
        }

    def _status(self, end: Done) -> str:
        return "incomplete" if self._parts.answer.finish_reason(end.reason) == "length" else "completed"

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
        written = (
            job.n_given - job.n_cached_exact if job.request.store else 0
        )  # what later prompts start from
        return {
            "input_tokens": job.n_given,
            "input_tokens_details": {**cached_details([job]), "cache_write_tokens": written},
            "output_tokens": job.n_answer,
            "output_tokens_details": {"reasoning_tokens": job.n_thought},
            "total_tokens": job.n_given + job.n_answer,
        }


API = ForeignAPI(generating=router)
