"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from mixedkv.engine.constrain.constraint import DeadEndError
from mixedkv.errors import ClosedError, ContextLengthError, EngineError, ModelChangedError, QueueFullError
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


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status.
        message: what is wrong and what to do.
        param: the field it is about.
        code: for programs, e.g. "model_not_found".
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str = "") -> Response:
        """Return the error in the format of the API at `path`: Anthropic's adds a type, Ollama's is the
        message alone.
        """
        body = {"type": "error", **self.body()} if path.startswith("/v1/messages") else self.body()
        if path.startswith("/api/"):
            body = {"error": self.message}
        # ASCII, since a message may quote text that cannot be encoded
        return Response(json.dumps(body), self.status, self.headers, "application/json")


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
        return bad_request(message, param, "context_length_exceeded")
    if isinstance(error, DeadEndError):
        return bad_request(message, message.partition(":")[0])
    if isinstance(error, EngineError):
        return ApiError(500, message, code="engine_error")
    return ApiError(500, "the request failed inside the server; its log has more", code="engine_error")


def prompt_error(error: ValueError, param: str, where: str = "") -> ApiError:
    """Return the error for a prompt that cannot be tokenized."""
    code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
    return bad_request(f"{where}{error}", param, code)


def no_key() -> ApiError:
    return ApiError(
        401,
        "a key is needed: send the header `Authorization: Bearer KEY` (or `x-api-key: KEY`) with one of "
        "this server's keys",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def timed_out(seconds: float) -> ApiError:
    return ApiError(504, f"the request took more than {seconds:g} seconds and was given up", code="timeout")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def session_error(error: ErrorResponse) -> ApiError:
    """Return the HTTP error for an error of the sessions."""
    status = {"session_not_found": 404, "session_quota": 429}.get(error.code, 409)
    return ApiError(status, error.detail, param="session_id", code=error.code)
