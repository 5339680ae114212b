"""Bodies of /v1/messages, Anthropic's API, and their translation to OpenAI's chats."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mixedkv.limits import INT32_MAX
from mixedkv.server.api.chat_message import TextOnly, TextOrImages
from mixedkv.server.api.fields import (
    LIST,
    MAX_MESSAGES,
    MAX_TOOLS,
    PREFIX_FOUND,
    TEXT,
    TEXT_OR_LIST,
    Few,
    FewMessages,
    Finite,
    Model,
    Name,
    StopTexts,
    Text,
    TopK,
    ranged,
)
from mixedkv.server.api.hosted import Filtered, WithoutHosted, is_one_of
from mixedkv.server.api_error import bad_request
from mixedkv.server.unknown_fields import IGNORED


class CacheControl(Model):
    type: Literal["ephemeral"]
    ttl: Name | None = None


class Block(Model):
    cache_control: CacheControl | None = Field(None, description=PREFIX_FOUND)
    citations: None = None


class TextBlock(Block):
    type: Literal["text"]
    text: Text


TextOrBlocks = Annotated[
    Annotated[Text, TEXT] | Annotated[list[TextBlock], Field(fail_fast=True), LIST], TEXT_OR_LIST, TextOnly
]


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


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: Annotated[Name, Field(min_length=1)]
    name: Name
    input: dict[str, Any]
    caller: Any = None


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: Annotated[Name, Field(min_length=1)]
    content: TextOrBlocks | None = None
    is_error: bool | None = None


AnyBlock = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]
Content = Annotated[
    Annotated[Text, TEXT] | Annotated[list[AnyBlock], Field(fail_fast=True), LIST], TEXT_OR_LIST, TextOrImages
]


class MessageParam(Model):
    role: Literal["user", "assistant", "system"]
    content: Content


class CustomTool(Model):
    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Text | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = Field(None, description=PREFIX_FOUND)
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
    budget_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    display: Name | None = None


class OutputConfig(Model):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: None = None


# blocks that are answered with an error, as an answer without them would be about something else
_MEDIA = ("image", "audio", "video", "input_audio", "file")
_BLOCKS = ("text", "thinking", "tool_use", "tool_result", *_MEDIA)
_BILLING = "x-anthropic-billing-header:"  # another one each turn, before all else


class CountRequest(WithoutHosted):
    """A request to count the tokens of a prompt."""

    model: Name | None = None
    messages: Annotated[
        list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), FewMessages
    ]
    system: TextOrBlocks | None = None
    tools: Annotated[list[CustomTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = Field(None, description=PREFIX_FOUND)

    @classmethod
    def drop_hosted(cls, body: dict[str, Any], filtered: Filtered) -> dict[str, Any]:
        if "tools" in body:
            body["tools"] = filtered.of("tools[]", body["tools"], is_one_of((None, "custom")))
        if isinstance(messages := body.get("messages"), list):
            body["messages"] = [_without_hosted(message, filtered) for message in messages]
        system = body.get("system")
        if isinstance(system, list) and system and _is_billing(system[0]):
            filtered.note("system.billing_header")
            body["system"] = system[1:]
        return body

    def fields(self) -> dict[str, Any]:
        """Return the fields of OpenAI's chat for the prompt."""
        messages = [message for param in self.messages for message in _messages(param)]
        if system := _text(self.system):
            messages.insert(0, {"role": "system", "content": system})
        variables, effort = None, None
        if self.thinking is not None:
            variables = {"enable_thinking": self.thinking.type != "disabled"}
        if self.output_config is not None and self.output_config.effort is not None:
            effort = {"max": "xhigh"}.get(self.output_config.effort, self.output_config.effort)
        return {
            "messages": messages,
            "tools": [tool.as_openai() for tool in self.tools or ()] or None,
            "chat_template_kwargs": variables,
            "reasoning_effort": effort,
            "continue_final_message": messages[-1]["role"] == "assistant"
            and not messages[-1].get("tool_calls"),
        }


class MessagesRequest(CountRequest):
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)]
    stop_sequences: StopTexts | None = None
    stream: bool | None = None
    temperature: Finite | None = ranged("temperature")
    top_p: Finite | None = ranged("top_p")
    top_k: TopK | None = None
    metadata: Annotated[dict[Name, Any], Few] | None = Field(None, description=IGNORED)
    service_tier: Name | None = Field(None, description=IGNORED)

    @property
    def _budget(self) -> int | None:
        enabled = self.thinking is not None and self.thinking.type == "enabled"
        return self.thinking.budget_tokens if self.thinking is not None and enabled else None

    def as_chat(self) -> dict[str, Any]:
        """The same of OpenAI's.

        Raises:
            ApiError: 400, it has no translation.
        """
        return {
            **self.fields(),
            **_choice(self.tool_choice),
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences or None,
            "stream": self.stream,
            "reasoning_budget_tokens": self._budget,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }


def _is_billing(block: Any) -> bool:
    return isinstance(block, dict) and str(block.get("text", "")).startswith(_BILLING)


def _without_hosted(message: Any, filtered: Filtered) -> Any:
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    content = filtered.of("messages[].content[]", message["content"], is_one_of(_BLOCKS))
    content = [
        {
            **block,
            "content": filtered.of("messages[].content[]", block["content"], is_one_of(("text", *_MEDIA))),
        }
        if isinstance(block, dict) and block.get("type") == "tool_result" and "content" in block
        else block
        for block in content
    ]
    return {**message, "content": content}


def _choice(choice: AnthropicChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    wanted: Any = {"any": "required"}.get(choice.type, choice.type)
    if choice.type == "tool":
        if not choice.name:
            raise bad_request("tool_choice.name is missing: say which tool", "tool_choice")
        wanted = {"type": "function", "function": {"name": choice.name}}
    disabled = choice.disable_parallel_tool_use
    return {"tool_choice": wanted, "parallel_tool_calls": None if disabled is None else not disabled}


def _text(content: str | list[TextBlock] | None) -> str:
    if isinstance(content, list):
        return "\n".join(block.text for block in content)
    return content or ""


def _messages(param: MessageParam) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form. Results of tools are messages of their own, and come first."""
    if isinstance(param.content, str):
        return [{"role": param.role, "content": param.content}]
    shown = [block for block in param.content if isinstance(block, TextBlock | ImageBlock)]
    thoughts = [block.thinking for block in param.content if isinstance(block, ThinkingBlock)]
    calls = [_call(block) for block in param.content if isinstance(block, ToolUseBlock)]
    out: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
        for block in param.content
        if isinstance(block, ToolResultBlock)
    ]
    if shown or thoughts or calls or not out:
        message: dict[str, Any] = {"role": param.role, "content": _content(shown)}
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        out.append(message)
    return out


def _content(blocks: list[TextBlock | ImageBlock]) -> str | list[dict[str, Any]]:
    """Return the text of content blocks, each on a line of its own."""
    if not any(isinstance(block, ImageBlock) for block in blocks):
        return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))
    parts: list[dict[str, Any]] = []
    for block in blocks:
        parts += [{"type": "text", "text": "\n"}] if parts else []
        if isinstance(block, TextBlock):
            parts.append({"type": "text", "text": block.text})
        else:
            parts.append({"type": "image_url", "image_url": {"url": block.source.as_url}})
    return parts


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input)}
    return {"id": block.id, "type": "function", "function": function}
