"""Evaluates prompts at the start, so that requests that begin with them do not wait."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from mixedkv.engine import Answer
from mixedkv.sessions.records import explain
from mixedkv_server.api.context import warm_job
from mixedkv_server.api.schemas import WarmRequest
from mixedkv_server.api_error import ApiError
from mixedkv_server.state import ServerState
from mixedkv_service.keys import Keys


class WarmLine(WarmRequest):
    """A line of a warm file: a body of /v1/warm and its tenant."""

    tenant: str = ""


def write_warm_file(path: Path, lines: Sequence[WarmLine]) -> str:
    """Write prompts as a file that `read_warm_file` reads; return its path."""
    path.write_text("".join(line.model_dump_json(exclude_unset=True) + "\n" for line in lines), "utf-8")
    return str(path)


def read_warm_file(path: str, keys: Keys) -> list[WarmLine]:
    """Read the file of prompts to evaluate at the start.

    Raises:
        ValueError: a line is not a WarmLine, or its tenant has no key; the message has the line's number.
    """
    lines = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                body = WarmLine.model_validate(json.loads(line))
            except ValidationError as error:
                raise ValueError(f"{path}, line {number}: {explain(error)}") from None
            except ValueError:
                raise ValueError(f"{path}, line {number}: not JSON") from None
            if not keys.has(body.tenant):
                remedy = "one of the key file's" if keys else "none, since there are no keys"
                raise ValueError(f"{path}, line {number}: tenant={body.tenant!r}: use {remedy}")
            lines.append(body)
    return lines


def warm(server: ServerState, body: WarmLine) -> None:
    """Evaluate one prompt, before the event loop runs.

    Raises:
        ValueError: it cannot be evaluated, or its model is not served.
    """
    names = {each.model_name: each for each in server.all}
    if body.model is not None and body.model not in names:
        raise ValueError(f"{server.settings.warm}: the model {body.model!r} is not served here")
    server = names.get(body.model or "", server)
    try:
        job = warm_job(server, body, body.tenant)
    except ApiError as error:
        raise ValueError(f"{server.settings.warm}: {error.message}") from None
    answer = Answer(server.engine, job)
    try:
        server.engine.submit_jobs([job], force=True)
        answer.result()
    except Exception as error:
        raise ValueError(f"{server.settings.warm}: {error}") from None
    finally:
        answer.cancel()
