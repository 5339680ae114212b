"""POST /infill: what is missing between two texts, as llama-server has it for editors."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mixedkv.engine.jobs.events import Delta, Done
from mixedkv.engine.jobs.job import Job
from mixedkv.server.api.generation import constraint_of, make_jobs
from mixedkv.server.api.logprobs import prompt_logprobs
from mixedkv.server.api.respond import respond
from mixedkv.server.api.schemas import InfillRequest
from mixedkv.server.api.sse import PING, sse
from mixedkv.server.api_error import ApiError, prompt_error
from mixedkv.server.http.json_body import JSONRoute
from mixedkv.server.state import ServerState, loaded_model, read_prompt, tenant

router = APIRouter(route_class=JSONRoute)


@router.post("/infill")
async def infill(body: InfillRequest, request: Request) -> Response:
    """Generate what is missing in the middle, whole or as server-sent events."""
    owner = tenant(request)
    server = await loaded_model(request, body.model)
    (job,) = await read_prompt(request, _jobs, server, body, owner)
    answer = _Answer(server, job)
    return await respond(request, server, [job], answer, stream=body.stream is True, large=False)


def _jobs(server: ServerState, body: InfillRequest, owner: str) -> list[Job]:
    files = [(extra.filename or "file", extra.text) for extra in body.input_extra or ()]
    try:
        tokens = server.engine.tokenizer.infill(
            body.input_prefix, body.input_suffix, beginning=body.prompt or "", files=files
        )
    except ValueError as error:
        raise prompt_error(error, "input_extra" if "input_extra" in str(error) else "input_prefix") from None
    n = body.n_predict if body.n_predict is not None else body.max_tokens
    constraint = constraint_of(body)
    return make_jobs(
        server, body, [tokens], owner=owner, max_tokens=n, constraint=constraint, param="input_prefix"
    )


class _Answer:
    def __init__(self, server: ServerState, job: Job) -> None:
        self._model, self._job, self._pieces = server.model_name, job, server.engine.detokenizer

    def whole(self, ends: list[Done]) -> dict[str, Any]:
        return self._end(ends[0], ends[0].text)

    def first(self) -> bytes:
        return b""

    def event(self, i: int, event: Delta | Done) -> bytes:
        if isinstance(event, Done):
            return sse(self._end(event, event.text))
        return sse({"index": 0, "content": event.text, "stop": False})

    def idle(self) -> bytes:
        return PING

    def failed(self, error: ApiError) -> bytes:
        return sse(error.body())

    def last(self) -> bytes:
        return b""

    def _end(self, end: Done, text: str) -> dict[str, Any]:
        job = self._job
        stop = "limit" if end.reason == "length" else "word" if job.answer.text.stopped else "eos"
        return {
            "index": 0,
            "content": text,
            "stop": True,
            "stop_type": stop,
            "stopping_word": job.answer.text.stopped_by,
            "model": self._model,
            "tokens_predicted": job.n_answer,
            "tokens_evaluated": job.n_prompt,
            "tokens_cached": job.n_cached or 0,
            **prompt_logprobs(self._pieces, job.answer.prompt_logprobs),
        }
