"""Parses large bodies in a process of their own: decoding JSON holds the interpreter's lock, and all streams
of the server would wait.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from typing import TypeAlias

from fastapi.exceptions import HTTPException, RequestValidationError
from pydantic import BaseModel

from mixedkv.server import body_process
from mixedkv.server.api_error import ApiError

_PROCESS = body_process.__name__  # not run by `-m`, since its objects would then belong to `__main__`
Read: TypeAlias = tuple[BaseModel, list[str], set[str]]
_ENDED = (OSError, EOFError, pickle.UnpicklingError)


def body_of(model: type[BaseModel], result: body_process.Result) -> Read:
    """Return the body from a result of the process.

    Raises:
        RequestValidationError, HTTPException: see `BodyReader.read`.
    """
    kind, found = result
    if kind is body_process.Kind.WRONG:
        raise RequestValidationError([{**found, "loc": ("body", *found["loc"])}])
    if kind is body_process.Kind.REFUSED:
        raise HTTPException(400, found)
    body, unknown, without_effect = found
    assert isinstance(body, model)
    return body, unknown, without_effect


class BodyReader:
    """Parses one body at a time. The process starts with the first one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._lock = threading.Lock()

    def read(self, model: type[BaseModel], body: bytes, strict: bool) -> Read:
        """Parse a body. Return it, the names of unknown fields that were ignored, and of known fields that
        have no effect. If `strict`, unknown fields are errors.

        Raises:
            RequestValidationError: the body is not JSON or does not match `model`; only the first error is
                reported.
            HTTPException: 400, the body has too many parts.
            ApiError: 503, the process has ended.
        """
        try:
            result = self._ask(model, body, strict)
        except _ENDED:
            self._end()
            try:  # the process may have ended long ago
                result = self._ask(model, body, strict)
            except _ENDED:
                self._end()
                raise ApiError(503, "the body could not be read: send less", code="not_read") from None
        return body_of(model, result)

    def close(self) -> None:
        """Stop the process. A body that is being parsed fails."""
        self._closed = True
        self._end()

    def _ask(self, model: type[BaseModel], body: bytes, strict: bool) -> body_process.Result:
        with self._lock:
            if self._closed:
                raise EOFError
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", f"import {_PROCESS} as process; process.main()"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C is handled by the server
                )
            process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        pickle.dump((model, body, strict), process.stdin, pickle.HIGHEST_PROTOCOL)
        process.stdin.flush()
        result: body_process.Result = pickle.load(process.stdout)
        return result

    def _end(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None
