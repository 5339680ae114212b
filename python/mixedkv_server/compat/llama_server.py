"""Answers as llama-server does: POST /completion, /infill and /apply-template; of any model GET /props and
/lora-adapters, POST /tokenize and /detokenize.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BeforeValidator, Field, field_validator, model_validator
from starlette.responses import JSONResponse, Response

from mixedkv import __version__
from mixedkv.engine import Constraint, Delta, Done, Job
from mixedkv.prompts.part import MARK
from mixedkv_server.api.engine_request import TokenizedPrompt, make_jobs
from mixedkv_server.api.llama_settings import about_answer, prompt_text
from mixedkv_server.api.logprobs import chat_logprobs, prompt_logprobs
from mixedkv_server.api.rendering import chat_of, image_files, rendered_text
from mixedkv_server.api.schemas import (
    MAX_CHOICES,
    ChatFields,
    GenerationFields,
    OnePrompt,
    PromptObject,
    as_prompts,
)
from mixedkv_server.api.sse import PING, SentAnswer, respond, sse
from mixedkv_server.api.usage import PromptProgress, cached_details, timings
from mixedkv_server.api_error import bad_request, prompt_error
from mixedkv_server.compat.foreign_api import ForeignAPI
from mixedkv_server.fields import Model, Name, NonNegative, Text, about
from mixedkv_server.http.json_body import JSONRoute
from mixedkv_server.packing import Long
from mixedkv_server.state import (
    ServerState,
    adapter_of,
    adapters,
    model_of,
    packed_answer,
    read_prompt,
    tenant,
)

MEDIA_MARKER = "<__media__>"  # where an image is in a prompt's text, as /props tells


class LlamaServerFields(GenerationFields):
    """The fields that /completion and /infill have in common."""

    n: Annotated[int, Field(ge=1, le=1)] | None = None
    cache_prompt: bool | None = about("False: evaluate the whole prompt, keep no rows.")
    n_probs: Annotated[int, Field(ge=0, le=1000)] | None = about(
        "So many of the likeliest tokens are told at each place."
    )
    post_sampling_probs: bool | None = about(
        "n_probs are of what the samplers left to draw from, as `prob` and `top_probs`."
    )
    json_schema: dict[str, Any] | None = about("JSON Schema that the answer follows.")
    return_tokens: bool | None = about("A whole answer has its tokens; the events of a stream always have.")
    response_fields: Annotated[list[Name], Field(max_length=256, fail_fast=True)] | None = about(
        "The fields of the answer's end that are sent; `timings/prompt_n` is one within another."
    )

    @field_validator("seed")
    @classmethod
    def _below_zero_is_another_one_each_time(cls, seed: int | None) -> int | None:
        return None if seed is not None and seed < 0 else seed

    @model_validator(mode="after")
    def _goes_without(self) -> LlamaServerFields:
        if self.session_id is not None:
            raise ValueError("session_id does not go with llama-server's API: leave it out")
        if self.cache_prompt is False:
            self.use_kv_cache = False
        return self

    @property
    def n_logprobs(self) -> int | None:
        return self.n_probs or None

    @property
    def post_sampling(self) -> bool:
        return bool(self.post_sampling_probs and self.n_probs)

    @property
    def answer_schema(self) -> Constraint | None:
        if self.json_schema is None:
            return None
        return Constraint("json_schema", json.dumps(self.json_schema), "json_schema")

    @property
    def tells_prompt(self) -> bool:
        return not self.response_fields or "prompt" in self.response_fields


class LlamaServerCompletion(LlamaServerFields):
    prompt: Annotated[
        list[OnePrompt],
        Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True),
        BeforeValidator(as_prompts, json_schema_input_type=OnePrompt | list[OnePrompt]),
    ]

    @model_validator(mode="after")
    def _images_have_one_prompt(self) -> LlamaServerCompletion:
        shown = [each for each in self.prompt if isinstance(each, PromptObject) and each.multimodal_data]
        if shown and len(self.prompt) > 1:
            raise ValueError("prompt: multimodal_data goes with one prompt: send several requests")
        return self


class ExtraFile(Model):
    filename: Name | None = None
    text: Text


class InfillRequest(LlamaServerFields):
    input_prefix: Text
    input_suffix: Text
    input_extra: Annotated[list[ExtraFile], Field(max_length=256, fail_fast=True)] | None = None
    prompt: Text | None = about("The beginning of what is missing.")


class TokenizeRequest(Model):
    model: Name | None = None
    content: Text
    add_special: bool = Field(False, description="The text begins a prompt: with the tokens that do that.")
    parse_special: bool = Field(True, description="Control tokens are read as such.")
    with_pieces: bool = False


class DetokenizeRequest(Model):
    model: Name | None = None
    tokens: Annotated[list[NonNegative], Field(fail_fast=True)]


class ApplyTemplateRequest(ChatFields):
    model: Name | None = None

    @property
    def goes_on(self) -> bool:
        return self._ends_with_answer()


router = APIRouter(route_class=JSONRoute)
others = APIRouter(route_class=JSONRoute)  # of any model


@router.post("/completion")
async def completion(body: LlamaServerCompletion, request: Request) -> Response:
    """Continue prompts, whole or as server-sent events. Several prompts get a list of answers."""
    return await _answer(body, request, _completion_jobs, several=len(body.prompt) > 1)


@router.post("/infill")
async def infill(body: InfillRequest, request: Request) -> Response:
    """Generate the missing middle of a text, whole or as server-sent events."""
    return await _answer(body, request, _infill_jobs)


async def _answer(
    body: LlamaServerFields, request: Request, jobs_of: Any, *, several: bool = False
) -> Response:
    owner = tenant(request)
    server = adapter_of(request, body.model, body.lora)
    jobs, texts = await read_prompt(request, _with_texts, server, jobs_of, body, owner)
    return await respond(request, _Answer(server, jobs, texts, body, several=several))


def _with_texts(
    server: ServerState, jobs_of: Any, body: LlamaServerFields, owner: str
) -> tuple[list[Job], list[str]]:
    """Return the jobs, and the texts of their prompts if they are told. A long text takes a while to make."""
    jobs: list[Job] = jobs_of(server, body, owner)
    if not body.tells_prompt:
        return jobs, [""] * len(jobs)
    return jobs, [prompt_text(job, server.engine.detokenizer) for job in jobs]


def _completion_jobs(server: ServerState, body: LlamaServerCompletion, owner: str) -> list[Job]:
    long = body.slides(server.settings.overflow)
    try:
        prompts = [_tokenized(server, prompt, long) for prompt in body.prompt]
    except ValueError as error:
        raise prompt_error(error, "prompt") from error
    return make_jobs(server, body, prompts, owner)


def _tokenized(server: ServerState, prompt: Any, long: bool) -> TokenizedPrompt:
    tokenizer = server.engine.tokenizer
    if isinstance(prompt, PromptObject) and prompt.multimodal_data:
        images = image_files(server, prompt.multimodal_data, "prompt.multimodal_data")
        text = prompt.prompt_string.replace(MEDIA_MARKER, MARK)
        tokens = tokenizer.with_images(text, images, start=True, long=long)
        return TokenizedPrompt(tokens=tokens, images=images)
    if isinstance(prompt, list):
        return TokenizedPrompt(tokens=tokenizer.mixed(prompt, long=long))
    text = prompt.prompt_string if isinstance(prompt, PromptObject) else prompt
    return TokenizedPrompt(tokens=tokenizer.prompt(text, long=long))


def _infill_jobs(server: ServerState, body: InfillRequest, owner: str) -> list[Job]:
    files = [(extra.filename or "tmp", extra.text) for extra in body.input_extra or ()]
    n_ctx, most = server.engine.n_ctx, body.most_tokens
    room = n_ctx - 1 - (n_ctx // 4 if most is None else min(most, n_ctx // 2))
    try:
        tokens = server.engine.tokenizer.infill(
            body.input_prefix, body.input_suffix, beginning=body.prompt or "", files=files, room=room
        )
    except ValueError as error:
        raise prompt_error(error, "input_prefix") from error
    return make_jobs(server, body, [TokenizedPrompt(tokens=tokens, field="input_prefix")], owner)


class _Answer(SentAnswer):
    """Builds llama-server's objects for the answer to one request, which has `several` prompts or one.

    Args:
        texts: the prompts.
    """

    def __init__(
        self,
        server: ServerState,
        jobs: Sequence[Job],
        texts: Sequence[str],
        body: LlamaServerFields,
        *,
        several: bool,
    ) -> None:
        super().__init__(
            server,
            jobs,
            streams=body.stream is True,
            progress=bool(body.return_progress),
            large=bool(body.n_probs) or body.prompt_logprobs is not None,
        )
        self._texts = texts
        self._token_texts, self._body, self._several = server.engine.detokenizer, body, several
        self._progress = PromptProgress(jobs[0], body.return_progress)

    def whole(self, ends: list[Done]) -> dict[str, Any] | list[dict[str, Any]]:
        answers = [self._end(i, end) for i, end in enumerate(ends)]
        return answers if self._several else answers[0]

    def event(self, i: int, event: Delta | Done) -> bytes:
        before = b"".join(map(self._of_prompt, self._progress.done()))
        if isinstance(event, Done):
            return before + sse(self._end(i, event))
        return before + sse({**self._of_event(i, event), "tokens": list(event.tokens), **self._timed(i)})

    def idle(self) -> bytes:
        progress = self._progress.now()
        return PING if progress is None else self._of_prompt(progress)

    def _of_prompt(self, progress: dict[str, Any]) -> bytes:
        return sse({**self._of_event(0, Delta("")), "prompt_progress": progress, **self._timed(0)})

    def _timed(self, i: int) -> dict[str, Any]:
        """Return the field about speed where it is asked for."""
        return {"timings": timings(self.jobs[i])} if self._body.timings_per_token else {}

    def _of_event(self, i: int, event: Delta | Done) -> dict[str, Any]:
        probabilities = {}
        if self._body.n_probs:
            entries = chat_logprobs(self._token_texts, event.logprobs, ids=True)["content"]
            if self._body.post_sampling_probs:
                entries = [_as_probabilities(entry) for entry in entries]
            probabilities = {"completion_probabilities": entries}
        return {"index": i, "content": event.text, "tokens": [], "stop": event.last, **probabilities}

    def _end(self, i: int, end: Done) -> dict[str, Any]:
        job = self.jobs[i]
        told = {
            **self._of_event(i, end),
            "tokens": list(job.answer.tokens) if self._body.return_tokens and not self._body.stream else [],
            "model": self.server.model_name,
            **about_answer(job, end, self._texts[i], self._body.most_tokens),
            "prompt_tokens_details": cached_details([job]),
            "timings": timings(job),
            **prompt_logprobs(self._token_texts, job),
        }
        return _chosen(told, self._body.response_fields) if self._body.response_fields else told


def _as_probabilities(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry with probabilities in place of their logarithms."""
    out = {name: value for name, value in entry.items() if name not in ("logprob", "top_logprobs")}
    out["prob"] = math.exp(entry["logprob"])
    if "top_logprobs" in entry:
        out["top_probs"] = [_as_probabilities(each) for each in entry["top_logprobs"]]
    return out


def _chosen(told: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Return these fields of an answer, those within others by their whole names."""
    out: dict[str, Any] = {}
    for name in fields:
        value: Any = told
        for part in name.split("/"):
            value = value.get(part, _chosen) if isinstance(value, dict) else _chosen
        if value is not _chosen:
            out[name] = value
    return out


@others.get("/props")
async def props(request: Request, model: Annotated[str | None, Query(max_length=256)] = None) -> Response:
    """Return the properties that llama-server's clients ask for first: context, template, defaults."""
    tenant(request)
    server = model_of(request, model, generates=False)
    n_ctx = server.facts["n_ctx"] or server.facts["embedding_n_ctx"]
    settings = {"n_ctx": n_ctx, "params": {**server.sampling, "n_predict": -1}}
    return JSONResponse(
        {
            "default_generation_settings": settings,
            "total_slots": server.settings.parallel,
            "model_alias": server.model_name,
            "model_path": server.path.name,
            "chat_template": server.chat_template,
            "modalities": {"vision": "vision" in server.capabilities, "audio": False},
            "media_marker": MEDIA_MARKER,
            "is_sleeping": False,
            "build_info": f"mixedkv-{__version__}",
        }
    )


@others.get("/lora-adapters")
async def lora_adapters(
    request: Request, model: Annotated[str | None, Query(max_length=256)] = None
) -> Response:
    """List a model's adapters by the ids that `lora` of a request takes, with their strengths."""
    tenant(request)
    model_of(request, model, generates=False)
    fields = (
        {"path": each.adapter, "scale": each.scale, "name": each.model_name} for each in adapters(request)
    )
    return JSONResponse([{"id": i, **each} for i, each in enumerate(fields)])


@others.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Return the token ids of a text."""
    return await _answer_tokens(request, _token_ids, body)


@others.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of token ids; control tokens are written out."""
    return await _answer_tokens(request, _text, body)


@router.post("/apply-template")
async def apply_template(body: ApplyTemplateRequest, request: Request) -> Response:
    """Return the text of the prompt that a chat is rendered to."""
    return await _answer_tokens(request, _prompt, body)


async def _answer_tokens(request: Request, make: Any, body: Any) -> Response:
    tenant(request)
    server = model_of(request, body.model, generates=make is _prompt)
    found = await read_prompt(request, make, server, body)
    return await packed_answer(request, server, lambda: found)


def _token_ids(server: ServerState, body: TokenizeRequest) -> dict[str, Any]:
    try:
        tokens = server.engine.tokenizer.tokenize(
            body.content, start=body.add_special, special=body.parse_special
        )
    except ValueError as error:
        raise prompt_error(error, "content") from None
    if not body.with_pieces:
        return {"tokens": Long(tokens)}
    return {"tokens": Long({"id": token, "piece": _token_field(server, token)} for token in tokens)}


def _token_field(server: ServerState, token: int) -> str | list[int]:
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


API = ForeignAPI(generating=router, others=others)
