"""Reads and renders the chat of a request, with its images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mixedkv.engine.chat.chat_template import Chat, RenderedChat, TemplateOptions, ToolChoice, check_depth
from mixedkv.images.picture import PromptImage
from mixedkv.images.pixels import read_data_url
from mixedkv.server.api.chat_message import Message
from mixedkv.server.api.schemas import ChatFields
from mixedkv.server.api.tools import check_calls, checked_tools
from mixedkv.server.api_error import ApiError, bad_request, prompt_error
from mixedkv.server.state import ServerState

_MAX_VARIABLES = 1 << 16  # characters of chat_template_kwargs
_OURS = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")


def chat_of(
    server: ServerState,
    body: ChatFields,
    choice: ToolChoice | None = None,
    before: Sequence[dict[str, Any]] = (),
) -> Chat:
    """Return the chat of a request, with its tools and images.

    Args:
        before: the messages of its session.

    Raises:
        ApiError: 400, fields conflict; the error names one.
    """
    choice = choice or ToolChoice()
    options = template_options(body)
    images = read_images(server, body.messages)
    if not body.tools and choice.mode == "required":
        raise bad_request("tool_choice asks for a call, and there are no tools: give tools", "tool_choice")
    check_calls(body.messages)
    return Chat(
        messages=[*before, *map(template_message, body.messages)],
        tools=checked_tools(body.tools or [], choice),
        choice=choice,
        options=options,
        images=images,
    )


def render(
    server: ServerState, chat: Chat, *, start: bool = True, long: bool = False
) -> tuple[list[int], RenderedChat]:
    """Render a chat as `Tokenizer.render` does.

    Raises:
        ApiError: 400; it names the field.
    """
    try:
        return server.engine.tokenizer.render(chat, start=start, long=long)
    except ValueError as error:
        raise _refused(error) from None


def rendered_text(server: ServerState, chat: Chat) -> str:
    """Return the text of a rendered chat.

    Raises:
        ApiError: 400; it names the field.
    """
    try:
        return server.engine.tokenizer.rendered(chat).text
    except ValueError as error:
        raise _refused(error) from None


def _refused(error: ValueError) -> ApiError:
    field = str(error).partition(":")[0]
    return prompt_error(error, field if field.isidentifier() else "messages")


def template_message(message: Message) -> dict[str, Any]:
    """Return a message in the form that chat templates expect."""
    out: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.text,
    }
    if message.name:
        out["name"] = message.name
    if message.reasoning_content:
        out["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        out["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    if message.tool_call_id:
        out["tool_call_id"] = message.tool_call_id
    return out


def template_options(body: ChatFields) -> TemplateOptions:
    """Return the template options of a request.

    Raises:
        ApiError: 400, a variable cannot be set.
    """
    variables, thinking = dict(body.chat_template_kwargs or {}), True
    _check_variables(variables)
    if "enable_thinking" in variables:
        thinking = variables.pop("enable_thinking")
        if not isinstance(thinking, bool):
            raise _wrong("enable_thinking: give true or false")
    if body.reasoning_effort == "none":
        thinking = False
    elif body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    if body.continue_final_message:
        last = body.messages[-1]
        if last.role != "assistant" or last.tool_calls:
            raise bad_request(
                "continue_final_message: the last message has to be an assistant's without tool_calls",
                "continue_final_message",
            )
    return TemplateOptions(
        variables=variables, thinking=thinking, continues=bool(body.continue_final_message)
    )


def _check_variables(variables: dict[str, Any]) -> None:
    try:
        check_depth(variables, "chat_template_kwargs")
        text = json.dumps(variables, ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except ValueError as error:
        raise _wrong(str(error).removeprefix("chat_template_kwargs: ")) from None
    if len(text) > _MAX_VARIABLES:
        raise _wrong(f"{len(text)} characters are more than {_MAX_VARIABLES}: say less")
    for name in variables:
        if name in _OURS:
            raise _wrong(f"{name} is the server's to say: leave it out")


def _wrong(message: str) -> Exception:
    return bad_request(f"chat_template_kwargs: {message}", "chat_template_kwargs")


_MOST = 64  # of a request


def read_images(server: ServerState, messages: Sequence[Message]) -> list[PromptImage]:
    """Return the images of all messages, in order. Not for the event loop, since encoding takes time.

    Raises:
        ApiError: 400, the model takes no images, or an image cannot be read.
    """
    urls = [(i, url) for i, message in enumerate(messages) for url in message.images]
    if not urls:
        return []
    if server.projector is None:
        raise bad_request(
            f"messages.{urls[0][0]}.content: the model {server.model_name!r} sees no images: serve it with "
            f"--mmproj, or leave them out",
            "messages",
        )
    if len(urls) > _MOST:
        raise bad_request(f"messages: {len(urls)} images are more than {_MOST}: leave some out", "messages")
    images = []
    for i, url in urls:
        try:
            images.append(server.projector.read(read_data_url(url)))
        except ValueError as error:
            raise bad_request(f"messages.{i}.content: image_url: {error}", "messages") from None
    return images
