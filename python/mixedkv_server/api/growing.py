"""Adds an answered turn to its session, unless another turn was added meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response
from starlette.types import Message as Sent
from starlette.types import Receive, Scope, Send

from mixedkv.engine import Delta, Done, Job
from mixedkv.sessions import CacheSessionMetadata, ContextMessage
from mixedkv.sessions.records import ErrorResponse
from mixedkv_server.api.rendering import template_message
from mixedkv_server.api.schemas import ChatRequest, CompletionRequest, GenerationFields, Message
from mixedkv_server.api.sse import SentAnswer, respond
from mixedkv_server.api_error import ApiError, bad_request, session_error
from mixedkv_server.state import ServerState

_HEADER = "x-session-version"


class Turn:
    """A turn to be added to its session, which is done at the answer's last event, before that is sent.

    Args:
        session: the session when the request came.

    Attributes:
        job: the job of the turn's answer.
    """

    job: Job

    def __init__(self, server: ServerState, session: CacheSessionMetadata) -> None:
        self._server, self._session = server, session
        self._text: list[str] = []
        self._messages: list[ContextMessage] = []
        self._prompt, self._continues = "", False

    @classmethod
    def of_chat(
        cls,
        server: ServerState,
        body: ChatRequest,
        session: CacheSessionMetadata | None,
        messages: Sequence[Message],
    ) -> Turn | None:
        """Return the turn of a chat in a session; None if the session stays as it is.

        Raises:
            ApiError: 400 or 409, the request cannot be added.
        """
        if session is None or not _grows(body, session):
            return None
        if session.messages is None:
            raise bad_request("append: this session holds a prompt, use /v1/completions", "append")
        turn = cls(server, session)
        turn._continues = bool(body.continue_final_message)
        turn._messages = [_context_message(template_message(message)) for message in messages]
        return turn

    @classmethod
    def of_prompt(
        cls, server: ServerState, body: CompletionRequest, session: CacheSessionMetadata | None
    ) -> Turn | None:
        """Return the turn of a raw prompt in a session, as `of_chat` does."""
        if session is None or not _grows(body, session):
            return None
        if session.prompt is None:
            raise bad_request("append: this session holds messages, use /v1/chat/completions", "append")
        if not isinstance(body.prompt, str):
            raise bad_request("append: give the prompt as one text", "prompt")
        turn = cls(server, session)
        turn._prompt = body.prompt
        return turn

    async def take(self, event: Delta | Done) -> None:
        """Take an event of the answer, and append the turn at the last one.

        Raises:
            ApiError: 409, another turn was appended first; 404, the session is gone; 429, it is too large.
        """
        self._text.append(event.text)
        if isinstance(event, Done):
            job = self.job
            updated = await self._server.contexts.update_session_cache(
                self._session, n_tokens=job.n_given + job.n_answer, **self._changes("".join(self._text))
            )
            if isinstance(updated, ErrorResponse):
                raise await _as_error(self._server, updated, self._session)

    def with_version(self, response: Response) -> Response:
        """Return the answer with the session's new version."""
        return _WithHeader(response, str(self._session.version + 1))

    def _changes(self, text: str) -> dict[str, Any]:
        if self._session.messages is None:
            return {"prompt": (self._session.prompt or "") + self._prompt + text}
        reader, before = self.job.request.reader(), self._messages
        reader.feed(text, last=True)
        said = reader.answer.message
        if self._continues:  # the last message is the beginning of the answer
            *before, begun = before
            said["content"] = (begun.content or "") + said["content"]
            if thought := (begun.reasoning_content or "") + said.get("reasoning_content", ""):
                said["reasoning_content"] = thought
        return {"messages": [*self._session.messages, *before, ContextMessage.model_validate(said)]}


async def respond_in(turn: Turn | None, request: Request, answer: SentAnswer) -> Response:
    """Answer as `respond` does, and append the turn to its session, if there is one."""
    if turn is None:
        return await respond(request, answer)
    turn.job = answer.jobs[0]
    return turn.with_version(await respond(request, answer, turn.take))


def check_version(body: GenerationFields, session: CacheSessionMetadata) -> None:
    """Refuse a request for another version of the session, before any work is done.

    Raises:
        ApiError: 409.
    """
    if body.session_version not in (None, session.version):
        raise _conflict(session, f"session_version={body.session_version}")


def _grows(body: GenerationFields, session: CacheSessionMetadata) -> bool:
    grows = session.mode == "append" if body.append is None else body.append
    if grows and (body.n or 1) > 1:
        raise bad_request("append goes with one answer: leave n out, or append", "n")
    if grows and body.use_kv_cache is False:
        raise bad_request("use_kv_cache=false keeps nothing: say append=false too, or leave it out", "append")
    return grows


def _context_message(message: dict[str, Any]) -> ContextMessage:
    known = {name: value for name, value in message.items() if name in ContextMessage.model_fields}
    return ContextMessage.model_validate(known)


async def _as_error(server: ServerState, error: ErrorResponse, session: CacheSessionMetadata) -> ApiError:
    if error.code == "session_changed":
        now = await server.contexts.get_session_metadata(session.session_id, tenant=session.tenant)
        if now is not None:
            return _conflict(now, f"this turn began at version {session.version}")
    return session_error(error)


def _conflict(now: CacheSessionMetadata, what: str) -> ApiError:
    return ApiError(
        409,
        f"{what}, session {now.session_id!r} is at version {now.version}: read what was said, and ask again",
        param="session_version",
        code="session_changed",
        headers={_HEADER: str(now.version)},
    )


class _WithHeader(Response):
    """A response, also a stream, with one more header."""

    def __init__(self, response: Response, version: str) -> None:
        self.background = None
        self._response, self._header = response, (_HEADER.encode(), version.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_header(message: Sent) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], self._header]}
            await send(message)

        await self._response(scope, receive, with_header)
