"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response

from mixedkv.errors import (
    ClosedError,
    ContextLengthError,
    DeadEndError,
    EngineError,
    ModelChangedError,
    NotFiniteError,
    QueueFullError,
)
from mixedkv.sessions.records import ErrorResponse

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


_RETRY_SECONDS = (
    "5"  # where nothing better is known: a restart takes longer, another replica is there at once
)


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status.
        message: what is wrong and what to do.
        param: the field it is about.
        code: for programs, e.g. "model_not_found".
        kind: its type, if not that of the status.
        numbers: further fields of the error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        kind: str = "",
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        waits = {"Retry-After": _RETRY_SECONDS} if status == 503 else {}
        self.headers, self.kind, self.numbers = {**waits, **(headers or {})}, kind, dict(numbers or {})

    @property
    def type_of_status(self) -> str:
        """The type of errors with this status."""
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind or self.type_of_status, "param": self.param}
        return {"error": {**error, "code": self.code, **self.numbers}}

    def response(self, path: str = "") -> Response:
        """Return the error in the form of the API at `path`."""
        form = next((form for begin, form in ERROR_FORMS.items() if path.startswith(begin)), ApiError.body)
        body = form(self)
        # ASCII, since a message may quote text that cannot be encoded
        return Response(json.dumps(body), self.status, self.headers, "application/json")


ERROR_FORMS: dict[str, Callable[[ApiError], dict[str, Any]]] = {}  # not OpenAI's, by how paths begin


def from_engine(error: Exception, param: str = "prompt") -> ApiError:
    """Return the HTTP error for an error of the engine; `param` is the field that holds the prompt."""
    message = str(error)
    if isinstance(error, QueueFullError):
        return ApiError(429, f"{message}: try again later", code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, ModelChangedError):
        return ApiError(503, message, code="model_changed")
    if isinstance(error, ClosedError):
        return ApiError(503, "the server is shutting down", code="shutting_down")
    if isinstance(error, ContextLengthError):
        return _too_long(error, message, param)
    if isinstance(error, DeadEndError):
        return bad_request(message, message.partition(":")[0])
    if isinstance(error, EngineError):
        return ApiError(
            500, message, code="not_finite" if isinstance(error, NotFiniteError) else "engine_error"
        )
    return ApiError(500, "the request failed inside the server; its log has more", code="engine_error")


def prompt_error(error: ValueError, param: str, where: str = "") -> ApiError:
    """Return the error for a prompt that cannot be tokenized."""
    message = f"{where}{error}"
    if isinstance(error, ContextLengthError):
        return _too_long(error, message, param)
    return bad_request(message, param)


def _too_long(error: ContextLengthError, message: str, param: str) -> ApiError:
    """Return the error for a prompt that does not fit, by OpenAI's code and llama-server's type."""
    if not error.n_tokens:
        return bad_request(message, param, "context_length_exceeded")
    return ApiError(
        400,
        message,
        param=param,
        code="context_length_exceeded",
        kind="exceed_context_size_error",
        numbers={"n_prompt_tokens": error.n_tokens, "n_ctx": error.most + 1},
    )


def no_key() -> ApiError:
    return ApiError(
        401,
        "a key is needed: send the header `Authorization: Bearer KEY` (or `x-api-key: KEY`) with one of "
        "this server's keys",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def too_many_connections() -> ApiError:
    return ApiError(
        503,
        "this server has as many connections as it takes: try again later",
        code="too_many_connections",
        headers={"Connection": "close", "Retry-After": "1"},
    )


def timed_out(seconds: float) -> ApiError:
    return ApiError(504, f"the request took more than {seconds:g} seconds and was given up", code="timeout")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def session_error(error: ErrorResponse) -> ApiError:
    """Return the HTTP error for an error of the sessions."""
    status = {"session_not_found": 404, "session_quota": 429}.get(error.code, 409)
    return ApiError(status, error.detail, param="session_id", code=error.code)
