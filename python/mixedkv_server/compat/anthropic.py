"""Anthropic's API: POST /v1/messages and /v1/messages/count_tokens. Bodies become chats of OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal
from xml.sax.saxutils import quoteattr

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import JSONResponse, Response

from mixedkv.engine import Delta, Done, Job, Part
from mixedkv.ids import new_id
from mixedkv_server.api.chat_jobs import chat_tokens, translated, translated_jobs
from mixedkv_server.api.rendering import choice_of
from mixedkv_server.api.schemas import ChatRequest, TextImagesOrDocuments, TextOnly, TextOrDocuments
from mixedkv_server.api.sse import SentAnswer, named_sse, respond
from mixedkv_server.api.usage import cached_details
from mixedkv_server.api_error import ApiError, bad_request
from mixedkv_server.compat.foreign_api import ForeignAPI
from mixedkv_server.fields import (
    PREFIX_FOUND,
    CallId,
    Filtered,
    Finite,
    FunctionName,
    LimitedFields,
    MessageList,
    Model,
    Name,
    NonNegative,
    Positive,
    StopTexts,
    Text,
    TextOrList,
    ToolList,
    TopK,
    WithoutHosted,
    about,
    ignored,
    ranged,
)
from mixedkv_server.http.json_body import JSONRoute
from mixedkv_server.state import ServerState, model_of, read_prompt, tenant

router = APIRouter(route_class=JSONRoute)


class CacheControl(Model):
    type: Literal["ephemeral"]
    ttl: Name | None = None


class Block(Model):
    cache_control: CacheControl | None = about(PREFIX_FOUND)
    citations: None = None


class TextBlock(Block):
    type: Literal["text"]
    text: Text


TextOrBlocks = Annotated[TextOrList[TextBlock], TextOnly]


class ImageSource(Model):
    type: Literal["base64", "url"]
    media_type: Name | None = None
    data: Text | None = None
    url: Text | None = None

    @model_validator(mode="after")
    def _has_what_it_says(self) -> ImageSource:
        if (self.data if self.type == "base64" else self.url) is None:
            raise ValueError(f"type {self.type}: {'data' if self.type == 'base64' else 'url'} is missing")
        return self

    @property
    def as_url(self) -> str:
        return self.url or f"data:{self.media_type or 'image/png'};base64,{self.data}"


class ImageBlock(Block):
    type: Literal["image"]
    source: ImageSource


class DocumentSource(Model):
    """The text of a document. Other sources are files, which this server does not read."""

    type: Literal["text", "content"]
    media_type: Literal["text/plain"] | None = None
    data: Text | None = None
    content: TextOrBlocks | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in ("text", "content"):
            raise ValueError(
                f"type {kind[:40]}: this server reads no files (PDF or others) and fetches none: send the "
                f'text itself, as {{"type": "text", "media_type": "text/plain", "data": ...}}'
            )
        return value

    @model_validator(mode="after")
    def _has_what_it_says(self) -> DocumentSource:
        if (self.data if self.type == "text" else self.content) is None:
            raise ValueError(f"type {self.type}: {'data' if self.type == 'text' else 'content'} is missing")
        return self


class CitationOptions(Model):
    enabled: bool | None = ignored()


class DocumentBlock(Model):
    type: Literal["document"]
    source: DocumentSource
    title: Text | None = None
    context: Text | None = None
    citations: CitationOptions | None = None
    cache_control: CacheControl | None = about(PREFIX_FOUND)

    @property
    def text(self) -> str:
        """The document as the model reads it."""
        source = self.source
        text = source.data if source.type == "text" else _text(source.content)
        return _enclosed("document", text or "", title=self.title, context=self.context)


class SearchResultBlock(Model):
    type: Literal["search_result"]
    source: Text
    title: Text
    content: TextOrBlocks
    citations: CitationOptions | None = None
    cache_control: CacheControl | None = about(PREFIX_FOUND)

    @property
    def text(self) -> str:
        """The result as the model reads it."""
        return _enclosed("search_result", _text(self.content), title=self.title, source=self.source)


TextualBlock = Annotated[TextBlock | DocumentBlock | SearchResultBlock, Field(discriminator="type")]


def _enclosed(tag: str, text: str, **attributes: str | None) -> str:
    """Return a text in a tag that says what it is, as long-context prompts are usually written."""
    said = "".join(f" {name}={quoteattr(value)}" for name, value in attributes.items() if value)
    return f"<{tag}{said}>\n{text}\n</{tag}>"


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: CallId
    name: Name
    input: dict[str, Any]
    caller: Any = None


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Annotated[TextOrList[TextualBlock], TextOrDocuments] | None = None
    is_error: bool | None = None


AnyBlock = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | ToolUseBlock
    | ToolResultBlock,
    Field(discriminator="type"),
]


class MessageParam(Model):
    role: Literal["user", "assistant", "system"]
    content: Annotated[TextOrList[AnyBlock], TextImagesOrDocuments]


class CustomTool(Model):
    type: Literal["custom"] | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = about(PREFIX_FOUND)
    strict: bool | None = None
    eager_input_streaming: bool | None = None

    def as_openai(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class AnthropicChoice(Model):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Model):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: NonNegative | None = None
    display: Name | None = None


class OutputFormat(Model):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Model):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = about("The schema that the answer's text follows.")


# blocks that are answered with an error, as an answer without them would be about something else
_MEDIA = ("image", "audio", "video", "input_audio", "file", "container_upload")
_TEXTS = ("text", "document", "search_result")
_BLOCKS = (*_TEXTS, "thinking", "tool_use", "tool_result", *_MEDIA)
_BILLING = "x-anthropic-billing-header:"  # another one each turn, before all else


class CountRequest(WithoutHosted):
    """A request to count the tokens of a prompt."""

    model: Name | None = None
    messages: MessageList[MessageParam]
    system: TextOrBlocks | None = None
    tools: ToolList[CustomTool] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = about("The beta's name of output_config.format.")
    cache_control: CacheControl | None = about(PREFIX_FOUND)

    @classmethod
    def drop_hosted(cls, body: dict[str, Any], filtered: Filtered) -> dict[str, Any]:
        if "tools" in body:
            body["tools"] = filtered.of("tools[]", body["tools"], (None, "custom"))
        if isinstance(messages := body.get("messages"), list):
            body["messages"] = [_without_hosted(message, filtered) for message in messages]
        system = body.get("system")
        if isinstance(system, list) and system and _is_billing(system[0]):
            filtered.dropped.append("system.billing_header")
            body["system"] = system[1:]
        return body

    def fields(self) -> dict[str, Any]:
        """Return the fields of OpenAI's chat for the prompt."""
        messages = [message for param in self.messages for message in _messages(param)]
        if system := _text(self.system):
            messages.insert(0, {"role": "system", "content": system})
        effort = self.output_config.effort if self.output_config is not None else None
        thinks = None if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}
        last = messages[-1]
        return {
            "messages": messages,
            "tools": [tool.as_openai() for tool in self.tools or ()] or None,
            "chat_template_kwargs": thinks,
            "reasoning_effort": "xhigh" if effort == "max" else effort,
            "continue_final_message": last["role"] == "assistant" and not last.get("tool_calls"),
        }


class MessagesRequest(CountRequest):
    max_tokens: Positive
    stop_sequences: StopTexts | None = None
    stream: bool | None = None
    temperature: Finite | None = ranged("temperature")
    top_p: Finite | None = ranged("top_p")
    top_k: TopK | None = None
    metadata: Annotated[dict[Name, Any], LimitedFields] | None = ignored()
    service_tier: Name | None = ignored()

    @property
    def form(self) -> OutputFormat | None:
        """The form that the answer has to have."""
        config = self.output_config
        return config.format if config is not None and config.format is not None else self.output_format

    def as_chat(self) -> dict[str, Any]:
        """Return the request as a chat of OpenAI's.

        Raises:
            ApiError: 400, it has no translation.
        """
        same = {
            name: getattr(self, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")
        }
        thinking = self.thinking if self.thinking and self.thinking.type == "enabled" else None
        return {
            **self.fields(),
            **_choice(self.tool_choice),
            **same,
            "response_format": _response_format(self.form),
            "stop": self.stop_sequences or None,
            "reasoning_budget_tokens": thinking.budget_tokens if thinking else None,
        }


def _is_billing(block: Any) -> bool:
    return isinstance(block, dict) and str(block.get("text", "")).startswith(_BILLING)


def _without_hosted(message: Any, filtered: Filtered) -> Any:
    if not isinstance(message, dict):
        return message
    content = filtered.of("messages[].content[]", message.get("content"), _BLOCKS)
    for i, block in enumerate(content if isinstance(content, list) else ()):
        if isinstance(block, dict) and block.get("type") == "tool_result" and "content" in block:
            result = filtered.of("messages[].content[]", block["content"], (*_TEXTS, *_MEDIA))
            content[i] = {**block, "content": result}
    return {**message, "content": content} if "content" in message else message


def _response_format(form: OutputFormat | None) -> dict[str, Any] | None:
    if form is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.schema_}}


def _choice(choice: AnthropicChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    requested: Any = "required" if choice.type == "any" else choice.type
    if choice.type == "tool":
        if not choice.name:
            raise bad_request("tool_choice.name is missing: say which tool", "tool_choice")
        requested = {"type": "function", "function": {"name": choice.name}}
    disabled = choice.disable_parallel_tool_use
    return {"tool_choice": requested, "parallel_tool_calls": None if disabled is None else not disabled}


def _text(content: str | Sequence[TextBlock | DocumentBlock | SearchResultBlock] | None) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content or ())


def _messages(param: MessageParam) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form. Results of tools are messages of their own, and come first."""
    if isinstance(param.content, str):
        return [{"role": param.role, "content": param.content}]
    results: list[dict[str, Any]] = []
    thoughts, calls, shown = [], [], []
    for block in param.content:
        if isinstance(block, ToolResultBlock):
            text = _text(block.content)
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            shown.append(block)
    if results and not (shown or thoughts or calls):
        return results
    message: dict[str, Any] = {"role": param.role, "content": _content(shown)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [*results, message]


def _content(
    blocks: list[TextBlock | DocumentBlock | SearchResultBlock | ImageBlock],
) -> str | list[dict[str, Any]]:
    """Return the text of content blocks, each on a line of its own; with images, parts."""
    parts: list[dict[str, Any]] = []
    for block in blocks:
        parts += [{"type": "text", "text": "\n"}] if parts else []
        if isinstance(block, ImageBlock):
            parts.append({"type": "image_url", "image_url": {"url": block.source.as_url}})
        else:
            parts.append({"type": "text", "text": block.text})
    if any(isinstance(block, ImageBlock) for block in blocks):
        return parts
    return "".join(part["text"] for part in parts)


@router.post("/v1/messages")
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Answer a chat, whole or as server-sent events."""
    owner = tenant(request)
    server = model_of(request, body.model)
    try:
        jobs = await read_prompt(request, translated_jobs, server, body.as_chat, owner)
    except ApiError as error:
        if any(each.role == "assistant" for each in body.messages):
            _say_it_is_too_long(error)
        raise
    return await respond(request, _Answer(server, body, jobs))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: Request) -> Response:
    """Count the tokens of a prompt."""
    server = model_of(request, body.model)
    return JSONResponse({"input_tokens": await read_prompt(request, _count, server, body)})


def _say_it_is_too_long(error: ApiError) -> None:
    """Write the error for a prompt that is too long so that Claude Code shortens its history."""
    if n_tokens := error.numbers.get("n_prompt_tokens"):
        remedy = error.message.rpartition(": ")[2]
        most = error.numbers["n_ctx"] - 1
        error.message = f"prompt is too long: {n_tokens} tokens > {most} maximum: {remedy}"


def _count(server: ServerState, body: CountRequest) -> int:
    chat = translated(ChatRequest, {**body.fields(), **_choice(body.tool_choice)})
    return len(chat_tokens(server, chat, choice_of(chat)))


class _Answer(SentAnswer):
    """Builds Anthropic's objects for an answer to one request: blocks of thoughts, text and calls."""

    def __init__(self, server: ServerState, body: MessagesRequest, jobs: list[Job]) -> None:
        self._body, (self._job,) = body, jobs
        self._parts = self._job.request.reader()
        super().__init__(server, jobs, streams=body.stream is True, large=self._parts.is_parsed)
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

    def takes_long(self, i: int) -> bool:
        return self._parts.takes_long

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
        return named_sse(_error(error))

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

    def _usage(self) -> dict[str, Any]:
        """Return Anthropic's usage, whose input tokens do not include cached ones."""
        cached = self._job.n_cached_exact
        return {
            "input_tokens": self._job.n_given - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self._job.n_answer,
            "prompt_tokens_details": cached_details([self._job]),
        }


def _error(error: ApiError) -> dict[str, Any]:
    """Return an error in Anthropic's form, by the types that its clients know."""
    return {"type": "error", "error": {**error.body()["error"], "type": error.type_of_status}}


API = ForeignAPI(generating=router, errors={"/v1/messages": _error})
