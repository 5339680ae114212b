"""The API of llama-server: its requests, /completion, /tokenize and what goes with them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BeforeValidator, Field, field_validator, model_validator
from starlette.responses import JSONResponse, Response

from mixedkv import __version__
from mixedkv.engine.constrain.constraint_text import Constraint
from mixedkv.engine.jobs.job import Delta, Done, Job
from mixedkv.limits import INT32_MAX
from mixedkv.server.api.generation import cached_details, constraint_of, make_jobs, prompt_progress, slides
from mixedkv.server.api.logprobs import chat_logprobs, prompt_logprobs
from mixedkv.server.api.rendering import chat_of, rendered_text
from mixedkv.server.api.schemas import (
    ApplyTemplateRequest,
    DetokenizeRequest,
    GenerationFields,
    Prompt,
    TokenizeRequest,
    prompts_of,
)
from mixedkv.server.api.sse import PING, SentAnswer, respond, sse
from mixedkv.server.api_error import bad_request, prompt_error
from mixedkv.server.fields import Few, Finite, Model, Name, Text
from mixedkv.server.http.json_body import JSONRoute
from mixedkv.server.state import ServerState, model_of, read_prompt, tenant

_BANNED = -100.0  # OpenAI's bias for a token that must never come


def _as_object(value: Any) -> Any:
    """Read `[[15043, -1.5], [2, false]]` as OpenAI's object."""
    if not isinstance(value, list):
        return value
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise ValueError("give pairs of a token's id and a number, or an object")
    return {str(token): _BANNED if bias is False else bias for token, bias in value}


class LlamaServerFields(GenerationFields):
    """The fields that /completion and /infill have in common."""

    n: Annotated[int, Field(ge=1, le=1)] | None = None
    n_predict: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = Field(
        None, description="Tokens of the answer at most; -1: as many as there is room for."
    )
    cache_prompt: bool | None = Field(None, description="False: evaluate the whole prompt, keep no rows.")
    n_probs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="So many of the likeliest tokens are told at each place."
    )
    json_schema: dict[str, Any] | None = Field(None, description="JSON Schema that the answer follows.")
    logit_bias: Annotated[
        dict[Annotated[str, Field(max_length=10)], Annotated[Finite, Field(ge=-100, le=100)]] | None,
        Few,
        BeforeValidator(_as_object),
    ] = None

    @field_validator("seed")
    @classmethod
    def _below_zero_is_another_one_each_time(cls, seed: int | None) -> int | None:
        return None if seed is not None and seed < 0 else seed

    @model_validator(mode="after")
    def _goes_without(self) -> LlamaServerFields:
        if self.session_id is not None:
            raise ValueError("session_id does not go with llama-server's API: leave it out")
        if self.n_predict == 0:
            raise ValueError("n_predict=0 is not supported by this server: use /v1/warm to evaluate a prompt")
        if self.cache_prompt is False:
            self.use_kv_cache = False
        return self

    @property
    def most_tokens(self) -> int | None:
        """The maximum length of the answer; None for as many tokens as fit."""
        if self.n_predict is None:
            return self.max_tokens
        return self.n_predict if self.n_predict > 0 else None


class LlamaServerCompletion(LlamaServerFields):
    prompt: Prompt

    @property
    def prompts(self) -> list[str | list[int]]:
        return prompts_of(self.prompt)


class ExtraFile(Model):
    filename: Name | None = None
    text: Text


class InfillRequest(LlamaServerFields):
    input_prefix: Text
    input_suffix: Text
    input_extra: Annotated[list[ExtraFile], Field(max_length=256, fail_fast=True)] | None = None
    prompt: Text | None = Field(None, description="The beginning of what is missing.")


router = APIRouter(route_class=JSONRoute)


@router.post("/completion")
async def completion(body: LlamaServerCompletion, request: Request) -> Response:
    """Continue prompts, whole or as server-sent events. Several prompts get a list of answers."""
    return await _answer(body, request, _completion_jobs, several=len(body.prompts) > 1)


@router.post("/infill")
async def infill(body: InfillRequest, request: Request) -> Response:
    """Generate the missing middle of a text, whole or as server-sent events."""
    return await _answer(body, request, _infill_jobs)


@router.get("/props")
async def props(request: Request, model: Annotated[str | None, Query(max_length=256)] = None) -> Response:
    """Return the properties that llama-server's clients ask for first: context, template, defaults."""
    tenant(request)
    server = model_of(request, model)
    settings = {"n_ctx": server.facts["n_ctx"], "params": {**server.sampling, "n_predict": -1}}
    return JSONResponse(
        {
            "default_generation_settings": settings,
            "total_slots": server.settings.parallel,
            "model_alias": server.model_name,
            "model_path": server.path.name,
            "chat_template": server.chat_template,
            "modalities": {"vision": "vision" in server.capabilities, "audio": False},
            "build_info": f"mixedkv-{__version__}",
        }
    )


async def _answer(
    body: LlamaServerFields, request: Request, jobs_of: Any, *, several: bool = False
) -> Response:
    owner = tenant(request)
    server = model_of(request, body.model)
    jobs = await read_prompt(request, jobs_of, server, body, owner)
    return await respond(
        request,
        server,
        jobs,
        _Answer(server, jobs, body, several=several),
        stream=body.stream is True,
        large=bool(body.n_probs),
        progress=bool(body.return_progress),
    )


def _completion_jobs(server: ServerState, body: LlamaServerCompletion, owner: str) -> list[Job]:
    tokenizer, long = server.engine.tokenizer, slides(server, body)
    try:
        prompts = [tokenizer.prompt(prompt, long=long) for prompt in body.prompts]
    except ValueError as error:
        raise prompt_error(error, "prompt") from None
    return _jobs(server, body, prompts, owner, "prompt")


def _infill_jobs(server: ServerState, body: InfillRequest, owner: str) -> list[Job]:
    files = [(extra.filename or "file", extra.text) for extra in body.input_extra or ()]
    try:
        tokens = server.engine.tokenizer.infill(
            body.input_prefix, body.input_suffix, beginning=body.prompt or "", files=files
        )
    except ValueError as error:
        raise prompt_error(error, "input_extra" if "input_extra" in str(error) else "input_prefix") from None
    return _jobs(server, body, [tokens], owner, "input_prefix")


def _jobs(
    server: ServerState, body: LlamaServerFields, prompts: Sequence[Sequence[int]], owner: str, param: str
) -> list[Job]:
    return make_jobs(
        server,
        body,
        prompts,
        owner=owner,
        max_tokens=body.most_tokens,
        constraint=constraint_of(body, _schema(body)),
        n_logprobs=body.n_probs or None,
        param=param,
    )


def _schema(body: LlamaServerFields) -> Constraint | None:
    if body.json_schema is None:
        return None
    return Constraint("json_schema", json.dumps(body.json_schema), "json_schema")


class _Answer(SentAnswer):
    """Builds llama-server's objects for the answer to one request, which has `several` prompts or one."""

    def __init__(
        self, server: ServerState, jobs: Sequence[Job], body: LlamaServerFields, *, several: bool
    ) -> None:
        self._model, self._jobs, self._pieces = server.model_name, jobs, server.engine.detokenizer
        self._body, self._several = body, several

    def whole(self, ends: list[Done]) -> dict[str, Any] | list[dict[str, Any]]:
        answers = [self._end(i, end) for i, end in enumerate(ends)]
        return answers if self._several else answers[0]

    def event(self, i: int, event: Delta | Done) -> bytes:
        return sse(self._end(i, event) if isinstance(event, Done) else self._piece(i, event))

    def idle(self) -> bytes:
        progress = prompt_progress(self._jobs[0]) if self._body.return_progress else None
        return PING if progress is None else sse({**self._piece(0, Delta("")), "prompt_progress": progress})

    def _piece(self, i: int, event: Delta | Done) -> dict[str, Any]:
        probabilities = {}
        if self._body.n_probs:
            entries = chat_logprobs(self._pieces, event.logprobs, ids=True)["content"]
            probabilities = {"completion_probabilities": entries}
        return {"index": i, "content": event.text, "tokens": [], "stop": event.last, **probabilities}

    def _end(self, i: int, end: Done) -> dict[str, Any]:
        job = self._jobs[i]
        stop = "limit" if end.reason == "length" else "word" if job.answer.text.stopped else "eos"
        return {
            **self._piece(i, end),
            "stop_type": stop,
            "stopping_word": job.answer.text.stopped_by,
            "model": self._model,
            "tokens_predicted": job.n_answer,
            "tokens_evaluated": job.n_prompt,
            "tokens_cached": job.n_cached or 0,
            "truncated": job.n_dropped > 0,
            "prompt_tokens_details": cached_details([job]),
            "timings": _timings(job),
            **prompt_logprobs(self._pieces, job.answer.prompt_logprobs),
        }


def _timings(job: Job) -> dict[str, Any]:
    """Return the evaluated and generated tokens, milliseconds, and tokens per second."""
    at = time.perf_counter()
    first = job.t_first if job.t_first is not None else at
    n_cached = job.n_cached or 0
    return {
        "cache_n": n_cached,
        **_rate("prompt", job.n_prompt - n_cached, first - job.t_submit),
        **_rate("predicted", job.n_answer, at - first),
    }


def _rate(name: str, n: int, seconds: float) -> dict[str, Any]:
    seconds = max(seconds, 1e-6)
    return {
        f"{name}_n": n,
        f"{name}_ms": round(1e3 * seconds, 3),
        f"{name}_per_token_ms": round(1e3 * seconds / max(n, 1), 3),
        f"{name}_per_second": round(n / seconds, 3),
    }


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Return the token ids of a text."""
    return await _answer_tokens(request, _tokens, body)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of token ids; control tokens are written out."""
    return await _answer_tokens(request, _text, body)


@router.post("/apply-template")
async def apply_template(body: ApplyTemplateRequest, request: Request) -> Response:
    """Return the text of the prompt that a chat is rendered to."""
    return await _answer_tokens(request, _prompt, body)


async def _answer_tokens(request: Request, make: Any, body: Any) -> Response:
    server = model_of(request, body.model)
    return JSONResponse(await read_prompt(request, make, server, body))


def _tokens(server: ServerState, body: TokenizeRequest) -> dict[str, Any]:
    try:
        tokens = server.engine.tokenizer.tokenize(
            body.content, start=body.add_special, special=body.parse_special
        )
    except ValueError as error:
        raise prompt_error(error, "content") from None
    if not body.with_pieces:
        return {"tokens": tokens}
    return {"tokens": [{"id": token, "piece": _piece(server, token)} for token in tokens]}


def _piece(server: ServerState, token: int) -> str | list[int]:
    """Return a token's text, or its bytes if these are not UTF-8."""
    name = server.engine.detokenizer.name(token)
    try:
        return name.decode("utf-8")
    except UnicodeDecodeError:
        return list(name)


def _text(server: ServerState, body: DetokenizeRequest) -> dict[str, Any]:
    try:
        tokens = server.engine.tokenizer.prompt(body.tokens)
    except ValueError as error:
        raise bad_request(str(error).replace("prompt:", "tokens:"), "tokens") from None
    text = b"".join(map(server.engine.detokenizer.name, tokens))
    return {"content": text.decode("utf-8", "replace")}


def _prompt(server: ServerState, body: ApplyTemplateRequest) -> dict[str, Any]:
    if any(message.images for message in body.messages):
        raise bad_request("messages: images have no text: leave them out", "messages")
    return {"prompt": rendered_text(server, chat_of(server, body))}
