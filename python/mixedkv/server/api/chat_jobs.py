"""From a chat to jobs, for all endpoints that answer chats, and what their answers say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from mixedkv.engine.chat.chat_template import RenderedChat, ToolChoice
from mixedkv.engine.constrain.constraint_text import Constraint
from mixedkv.engine.jobs.events import Delta, Done
from mixedkv.engine.jobs.job import Job
from mixedkv.engine.text.answer_reader import Part, ReadAnswer
from mixedkv.images import PromptImage
from mixedkv.server.api.generation import constraint_of, context_tokens, make_jobs, slides
from mixedkv.server.api.images import read_images
from mixedkv.server.api.rendering import render_request, template_message, template_options
from mixedkv.server.api.schemas import ChatFields, ChatRequest
from mixedkv.server.api.tools import choice_of
from mixedkv.server.api_error import bad_request, prompt_error
from mixedkv.server.state import ServerState
from mixedkv.sessions import CacheSessionMetadata

_T = TypeVar("_T", bound=BaseModel)


class AnswerParts:
    """What one answer says, piece by piece.

    Args:
        chat: says how it is read, where llama.cpp's chat layer does that.
    """

    def __init__(self, chat: RenderedChat | None) -> None:
        self._reader = chat.reader() if chat is not None else None
        self.answer = self._reader.answer if self._reader is not None else ReadAnswer()

    def feed(self, event: Delta | Done) -> list[Part]:
        if self._reader is not None:
            return self._reader.feed(event.text, last=isinstance(event, Done))
        self.answer.content += event.text
        return [Part(content=event.text)] if event.text else []

    def reason(self, end: Done) -> str:
        """OpenAI's finish_reason."""
        return "tool_calls" if self.answer.calls and end.reason == "stop" else end.reason


def message_of(answer: ReadAnswer) -> dict[str, Any]:
    """What was said, without calls, as a message of a history: thoughts are apart."""
    said: dict[str, Any] = {"role": "assistant", "content": answer.content}
    return {**said, "reasoning_content": answer.reasoning} if answer.reasoning else said


def chat_jobs(
    server: ServerState, body: ChatRequest, owner: str, session: CacheSessionMetadata | None
) -> tuple[list[Job], RenderedChat | None]:
    """And how their answers are read, where llama.cpp's chat layer does that."""
    before: list[dict[str, Any]] = []
    prefix: list[int] = []
    if session is not None and session.messages is not None:
        before = [message.model_dump(exclude_none=True) for message in session.messages]
    elif session is not None:
        prefix = context_tokens(server, session, long=slides(server, body))
    if session is not None and any(message.images for message in body.messages):
        raise bad_request("images do not go with session_id: leave one out", "session_id")
    choice, options = choice_of(body), template_options(body)
    images = read_images(server, body.messages)
    rendering = render_request(server, body.messages, body.tools, choice, options, before)
    if rendering is None:
        return _plain_jobs(server, body, owner, before, prefix, session, images), None
    if session is not None and (rendering.tools or any("tool_calls" in m for m in rendering.messages)):
        raise bad_request(
            "tools, calls and their results do not go with session_id: leave one out", "session_id"
        )
    tokens, chat = rendering.tokens(server, long=slides(server, body), images=images)
    constraint = chat.constraint or _constraint(body)
    tokens, stops = prefix + tokens, chat.stops
    jobs = _make(
        server,
        body,
        tokens,
        owner,
        constraint=constraint,
        stops=stops,
        session=session,
        chat=chat,
        images=images,
    )
    return jobs, chat


def translated(kind: type[_T], fields: dict[str, Any]) -> _T:
    """A request of another API as one of OpenAI's chats.

    Raises:
        ApiError: 400, it is none.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise bad_request(f"{where}: {first['msg'].removeprefix('Value error, ')}", where or None) from None


def chat_tokens(server: ServerState, body: ChatFields) -> list[int]:
    """Of a prompt that nobody answers.

    Raises:
        ApiError: 400.
    """
    rendering = render_request(server, body.messages, body.tools, ToolChoice(), template_options(body))
    images = read_images(server, body.messages)
    if rendering is not None:
        return rendering.tokens(server, images=images)[0]
    messages = [template_message(message) for message in body.messages]
    try:
        return server.engine.tokenizer.chat(messages, images=images)[0]
    except ValueError as error:
        raise prompt_error(error, "messages") from None


def _plain_jobs(
    server: ServerState,
    body: ChatRequest,
    owner: str,
    before: list[dict[str, Any]],
    prefix: list[int],
    session: CacheSessionMetadata | None,
    images: Sequence[PromptImage],
) -> list[Job]:
    messages = [*before, *map(template_message, body.messages)]
    try:
        long = slides(server, body)
        tokens, stops = server.engine.tokenizer.chat(messages, start=not prefix, long=long, images=images)
    except ValueError as error:
        raise prompt_error(error, "messages") from None
    return _make(
        server,
        body,
        prefix + tokens,
        owner,
        constraint=_constraint(body),
        stops=stops,
        session=session,
        images=images,
    )


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
        budget=body.reasoning_budget_tokens,
        prediction=body.prediction.text if body.prediction is not None else "",
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
