"""Reads and renders the chat of a request, with its images, its tools and their calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mixedkv.engine import Chat, Part, RenderedChat, TemplateOptions, ToolChoice
from mixedkv.images.decoding import decoded
from mixedkv.images.pixels import n_pixels, read_data_url
from mixedkv.images.projector import Projector
from mixedkv.images.prompt_image import PromptImage
from mixedkv.limits import check_depth
from mixedkv_server.api.schemas import ChatFields, ChatRequest, Message, NamedTool, Tool
from mixedkv_server.api_error import ApiError, bad_request, prompt_error
from mixedkv_server.fields import check_variables
from mixedkv_server.state import ServerState


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
    options = template_options(server, body)
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


def template_options(server: ServerState, body: ChatFields) -> TemplateOptions:
    """Return the template options of a request; what it does not say is as the server was started.

    Raises:
        ApiError: 400, a variable cannot be set.
    """
    given = dict(body.chat_template_kwargs or {})
    try:
        check_variables(given)
    except ValueError as error:
        raise bad_request(f"chat_template_kwargs: {error}", "chat_template_kwargs") from None
    settings = server.settings
    variables = {"enable_thinking": settings.reasoning != "off", **settings.template_variables, **given}
    thinking = bool(variables.pop("enable_thinking"))
    if body.reasoning_effort == "none":
        thinking = False
    elif body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
        thinking = thinking or "enable_thinking" not in given
    if body.continue_final_message:
        last = body.messages[-1]
        if last.role != "assistant" or last.tool_calls:
            raise bad_request(
                "continue_final_message: the last message has to be an assistant's without tool_calls",
                "continue_final_message",
            )
    continues = body.goes_on if body.continue_final_message is None else body.continue_final_message
    if continues and body.continue_final_message is None:
        may_call = bool(body.tools) and getattr(body, "tool_choice", None) != "none"
        continues = server.engine.tokenizer.can_continue(may_call)
    _check_beginning(body, continues)
    return TemplateOptions(variables=variables, thinking=thinking, continues=continues)


def _check_beginning(body: ChatFields, continues: bool) -> None:
    """Refuse a chat that would end without the beginning of an answer, or that asks for two."""
    if body.add_generation_prompt is False and not continues:
        raise bad_request(
            "add_generation_prompt: false is not supported, as an answer begins where the template begins "
            "the assistant's turn: leave it out, send continue_final_message with a last message of the "
            "assistant, or send the text of your own rendering to /v1/completions",
            "add_generation_prompt",
        )
    if body.add_generation_prompt and body.continue_final_message:
        raise bad_request(
            "add_generation_prompt: true begins another message, which continue_final_message does not: "
            "leave one out",
            "add_generation_prompt",
        )


_MOST = 64  # of a request
_MOST_PIXELS = 1 << 27  # of a request: 64 of 1920 x 1080


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
    named = [(f"messages.{i}.content: image_url", url) for i, url in urls]
    return _encoded(server.projector, named, "messages")


def image_files(server: ServerState, files: Sequence[str], param: str) -> list[PromptImage]:
    """Return the images of files in Base64, in order. Not for the event loop.

    Raises:
        ApiError: 400, as `read_images`.
    """
    if server.projector is None:
        raise bad_request(
            f"{param}: the model {server.model_name!r} sees no images: serve it with --mmproj, or leave them "
            "out",
            param,
        )
    return _encoded(server.projector, [(param, f"data:image/any;base64,{file}") for file in files], param)


def _encoded(projector: Projector, urls: Sequence[tuple[str, str]], param: str) -> list[PromptImage]:
    """Return the images of data URLs, each with its place in the body. All are counted before one is read."""
    if len(urls) > _MOST:
        raise bad_request(f"{param}: {len(urls)} images are more than {_MOST}: leave some out", param)
    files = []
    for place, url in urls:
        with _errors_of(place, param):
            files.append(read_data_url(url))
    if (n := sum(map(n_pixels, files))) > _MOST_PIXELS:
        raise bad_request(
            f"{param}: the images have {n} pixels, at most {_MOST_PIXELS} are taken at a time: make them "
            "smaller, or leave some out",
            param,
        )
    images = []
    for (place, _), file in zip(urls, files, strict=True):
        with _errors_of(place, param):
            images.append(projector.read(file, decoded))
    return images


@contextmanager
def _errors_of(place: str, param: str) -> Iterator[None]:
    """Say that an error is about the image of a place."""
    try:
        yield
    except ValueError as error:
        raise bad_request(f"{place}: {error}", param) from None


def choice_of(body: ChatRequest) -> ToolChoice:
    """Return the tool choice of a request.

    Raises:
        ApiError: 400, calls conflict with other fields.
    """
    requested = body.tool_choice
    if isinstance(requested, NamedTool):
        choice = ToolChoice(mode="required", name=requested.function.name, parallel=False)
    else:
        choice = ToolChoice(mode=requested or "auto", parallel=body.parallel_tool_calls)
    if not body.tools or choice.mode == "none":
        return choice
    names = ("response_format", "json_schema", "grammar", "regex")
    formats = {name: getattr(body, name) for name in names}
    for name, value in formats.items():
        if value is not None and getattr(value, "type", "") != "text":
            raise bad_request(
                f"{name} and tools both say what the answer looks like: leave one out, or set "
                "tool_choice to none",
                name,
            )
    return choice


def checked_tools(tools: Sequence[Tool], choice: ToolChoice) -> list[dict[str, Any]]:
    """Return tools in the form that templates expect.

    Raises:
        ApiError: 400, two tools have one name, a schema is invalid, or the chosen tool is missing.
    """
    names: set[str] = set()
    for i, tool in enumerate(tools):
        name, where = tool.function.name, f"tools[{i}].function"
        if name in names:
            raise bad_request(f"{where}.name: there are two tools {name!r}: rename one", "tools")
        names.add(name)
        if tool.function.parameters:
            _check_parameters(tool.function.parameters, f"{where}.parameters")
    if choice.name and choice.name not in names:
        raise bad_request(f"tool_choice: there is no tool {choice.name!r} in tools", "tool_choice")
    return [tool.model_dump(exclude_none=True) for tool in tools]


def _check_parameters(schema: dict[str, Any], where: str) -> None:
    """Check parameters as far as templates and parsers use them. A forced call checks all of them."""
    try:
        check_depth(schema, where)
        json.dumps(schema, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except ValueError as error:
        message = str(error) if where in str(error) else f"{where}: {error}"
        raise bad_request(message, "tools") from None
    if schema.get("type") != "object":
        raise bad_request(f'{where}: arguments are an object: give it "type": "object"', "tools")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not all(isinstance(v, dict | bool) for v in properties.values()):
        raise bad_request(f"{where}.properties: give an object of schemas", "tools")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise bad_request(f"{where}.required: give a list of names", "tools")


def check_calls(messages: Sequence[Message]) -> None:
    """Check that each result answers an earlier call, once.

    Raises:
        ApiError: 400.
    """
    open_calls: set[str] = set()
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if message.tool_calls and message.role != "assistant":
            raise _wrong_call(f"{where}.tool_calls: only assistants call: leave them out")
        if message.tool_call_id and message.role != "tool":
            raise _wrong_call(f"{where}.tool_call_id goes with role tool only: leave it out")
        if message.role == "tool":
            if not message.tool_call_id:
                raise _wrong_call(f"{where}.tool_call_id is missing: give the id of the call it answers")
            if message.tool_call_id not in open_calls:
                raise _wrong_call(
                    f"{where}.tool_call_id: no assistant message before it has an unanswered call "
                    f"{message.tool_call_id!r}: send the message that called, with its tool_calls"
                )
            open_calls.remove(message.tool_call_id)
        for j, call in enumerate(message.tool_calls or ()):
            name = f"{where}.tool_calls[{j}]"
            if call.id in open_calls:
                raise _wrong_call(f"{name}.id: {call.id!r} is another call's: give each its own")
            open_calls.add(call.id)
            _check_arguments(call.function.arguments, f"{name}.function.arguments")


def _check_arguments(text: str, where: str) -> None:
    """Check a call's arguments, which templates use."""
    try:
        arguments = json.loads(text)
    except RecursionError:
        raise _wrong_call(f"{where}: nested too deep: make it flatter") from None
    except ValueError as error:
        raise _wrong_call(
            f"{where}: no JSON ({error}): leave a call out that was cut off, and its result"
        ) from None
    try:
        check_depth(arguments, where)
    except ValueError as error:
        raise _wrong_call(str(error)) from None


def _wrong_call(message: str) -> ApiError:
    return bad_request(message, "messages")


def delta(part: Part) -> dict[str, Any]:
    """Return the delta of a stream for a part of an answer."""
    if part.index < 0:
        return {"reasoning_content": part.reasoning} if part.reasoning else {"content": part.content}
    function = {**({"name": part.name} if part.name else {}), "arguments": part.arguments}
    first = {"id": part.id, "type": "function"} if part.name else {}
    return {"tool_calls": [{"index": part.index, **first, "function": function}]}
