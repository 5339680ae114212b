"""Makes jobs from a chat, for all endpoints that answer chats, and messages from their answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from mixedkv.doors.settings import in_words
from mixedkv.engine import Constraint, Job, RenderedChat, ToolChoice
from mixedkv.ids import new_id
from mixedkv.server.api.generation import constraint_of, context_tokens, make_jobs, slides
from mixedkv.server.api.rendering import chat_of, choice_of, render
from mixedkv.server.api.schemas import ChatFields, ChatRequest
from mixedkv.server.api_error import bad_request
from mixedkv.server.fields import place
from mixedkv.server.state import ServerState
from mixedkv.sessions import CacheSessionMetadata

_T = TypeVar("_T", bound=BaseModel)


def chat_jobs(
    server: ServerState, body: ChatRequest, owner: str, session: CacheSessionMetadata | None = None
) -> tuple[list[Job], RenderedChat]:
    """Return the jobs that answer a chat, and the rendered chat, which tells how their answers are read."""
    before: list[dict[str, Any]] = []
    prefix: list[int] = []
    long = slides(server, body)
    if session is not None and session.messages is not None:
        before = [message.model_dump(exclude_none=True) for message in session.messages]
    elif session is not None:
        prefix = context_tokens(server, session, long=long)
    if session is not None and any(message.images for message in body.messages):
        raise bad_request("images do not go with session_id: leave one out", "session_id")
    chat = chat_of(server, body, choice_of(body), before)
    if session is not None and (chat.tools or any("tool_calls" in message for message in chat.messages)):
        raise bad_request(
            "tools, calls and their results do not go with session_id: leave one out", "session_id"
        )
    tokens, rendered = render(server, chat, start=not prefix, long=long)
    ends: list[tuple[str, int]] = []
    if not chat.images:
        named = [(message.message_id or "", message.text) for message in body.messages]
        ends = server.engine.message_ends(named, rendered.text, tokens)
    jobs = make_jobs(
        server,
        body,
        [prefix + tokens],
        owner=owner,
        max_tokens=body.most_tokens(),
        n_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        constraint=rendered.constraint or constraint_of(body, _schema(body)),
        session=session,
        param="messages",
        chat=rendered,
        budget=_budget(server, body),
        prediction=body.prediction.text if body.prediction is not None else "",
        images=chat.images,
        message_ends=[(name, len(prefix) + end) for name, end in ends],
    )
    if body.names_answers:
        for job in jobs:
            job.message_id = new_id("msg")
    return jobs, rendered


def translated(kind: type[_T], fields: dict[str, Any]) -> _T:
    """Return a request of another API as a request of OpenAI's.

    Raises:
        ApiError: 400, it is invalid.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = place(first["loc"])
        raise bad_request(f"{where}: {in_words(first['msg'])}", where or None) from None


def translated_jobs(
    server: ServerState, as_chat: Callable[[], dict[str, Any]], owner: str
) -> tuple[list[Job], RenderedChat]:
    """Return what `chat_jobs` does for a request of another API, given what makes OpenAI's fields of it."""
    return chat_jobs(server, translated(ChatRequest, as_chat()), owner)


def chat_tokens(server: ServerState, body: ChatFields, choice: ToolChoice | None = None) -> list[int]:
    """Return the tokens of a prompt that nobody answers.

    Raises:
        ApiError: 400.
    """
    return render(server, chat_of(server, body, choice))[0]


def _budget(server: ServerState, body: ChatRequest) -> int | None:
    """Return after how many tokens a thought is ended; None for never."""
    given, default = body.reasoning_budget_tokens, server.settings.reasoning_budget
    return given if given is not None else default if default >= 0 else None


def _schema(body: ChatRequest) -> Constraint | None:
    if body.json_schema is not None:
        return Constraint("json_schema", json.dumps(body.json_schema), "json_schema")
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    schema = wanted.json_schema.schema_ if wanted.json_schema is not None else wanted.schema_
    text = json.dumps({"type": "object"} if schema is None else schema)
    return Constraint("json_schema", text, "response_format")
