"""Makes jobs from a chat, for all endpoints that answer chats, and messages from their answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from mixedkv.engine import Job, ToolChoice
from mixedkv.ids import new_id
from mixedkv.sessions import CacheSessionMetadata
from mixedkv_server.api.engine_request import TokenizedPrompt, context_tokens, make_jobs
from mixedkv_server.api.rendering import chat_of, choice_of, render
from mixedkv_server.api.schemas import ChatFields, ChatRequest
from mixedkv_server.api_error import bad_request
from mixedkv_server.fields import place
from mixedkv_server.state import ServerState
from mixedkv_service.settings import in_words

_T = TypeVar("_T", bound=BaseModel)


def chat_jobs(
    server: ServerState, body: ChatRequest, owner: str, session: CacheSessionMetadata | None = None
) -> list[Job]:
    """Return the jobs that answer a chat.

    Raises:
        ApiError: 400.
    """
    jobs = make_jobs(server, body, [chat_prompt(server, body, session)], owner, session)
    if body.names_answers:
        for job in jobs:
            job.message_id = new_id("msg")
    return jobs


def chat_prompt(
    server: ServerState, body: ChatRequest, session: CacheSessionMetadata | None = None
) -> TokenizedPrompt:
    """Return the prompt that a chat is rendered to, behind that of its session.

    Raises:
        ApiError: 400, fields conflict, or the template refuses the chat; the error names one.
    """
    before: list[dict[str, Any]] = []
    prefix: list[int] = []
    long = body.slides(server.settings.overflow)
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
    return TokenizedPrompt(
        tokens=prefix + tokens,
        field="messages",
        chat=rendered,
        images=chat.images,
        message_ends=[(name, len(prefix) + end) for name, end in ends],
    )


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


def translated_jobs(server: ServerState, as_chat: Callable[[], dict[str, Any]], owner: str) -> list[Job]:
    """Return the jobs for a chat of another API, given what makes OpenAI's fields of it.

    Raises:
        ApiError: 400.
    """
    return chat_jobs(server, translated(ChatRequest, as_chat()), owner)


def chat_tokens(server: ServerState, body: ChatFields, choice: ToolChoice | None = None) -> list[int]:
    """Return the tokens of a prompt that nobody answers.

    Raises:
        ApiError: 400.
    """
    return render(server, chat_of(server, body, choice))[0]
