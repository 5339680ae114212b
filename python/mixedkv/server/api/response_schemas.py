"""Bodies of /v1/responses, OpenAI's API, and their translation to chats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from mixedkv.server.api.schemas import Metadata, StreamOptions, TextOnly, TextOrImages, TextPart
from mixedkv.server.fields import (
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
    return f"~{kind}" if kind in ("output_text", "input_image") else "~text"


AnyPart = Annotated[
    Annotated[OutputText, Tag("~output_text")]
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
    previous_response_id: Id | None = about("Of a response that is kept: its history goes before the input.")
    # known, but not what this server does: see `_refuse_unsupported`
    conversation: Any = about(REFUSED)
    background: bool | None = about(REFUSED)
    prompt: Any = about(REFUSED)
    top_logprobs: TopLogprobs | None = about(REFUSED)

    @classmethod
    def drop_hosted(cls, body: dict[str, Any], filtered: Filtered) -> dict[str, Any]:
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

    def as_chat(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the request as a chat of these messages."""
        choice, system = self.tool_choice, {"role": "system", "content": self.instructions}
        same = ("temperature", "top_p", "parallel_tool_calls", "stream")
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


def _format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    return {"type": "json_schema", "json_schema": {"name": wanted.name or "schema", "schema": wanted.schema_}}
