"""Ollama's API: POST /api/chat and /api/generate; of models that only embed too GET /api/tags, /api/ps,
/api/version, POST /api/show, /api/embed, /api/embeddings.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import AfterValidator, Field, model_validator
from starlette.responses import JSONResponse, Response

from mixedkv import __version__
from mixedkv.engine import Delta, Done, Embedder, Job
from mixedkv.limits import INT32_MAX, RANGES
from mixedkv.model.fingerprint import fingerprint
from mixedkv_server.api.chat_jobs import translated, translated_jobs
from mixedkv_server.api.completions import completion_jobs
from mixedkv_server.api.embeddings import Vectors, checked_embedder, embed, input_tokens
from mixedkv_server.api.logprobs import chat_logprobs
from mixedkv_server.api.schemas import AnyChoice, CompletionRequest, EmbeddingRequest, Tool
from mixedkv_server.api.sse import NDJSON, SentAnswer, json_line, respond
from mixedkv_server.api.usage import cached_details
from mixedkv_server.api_error import ApiError, bad_request
from mixedkv_server.compat.foreign_api import ForeignAPI, RoutedFields
from mixedkv_server.fields import (
    FLAG,
    LIST,
    MAX_MESSAGES,
    NUMBER,
    OBJECT,
    REFUSED,
    TEXT,
    TEXT_OR_LIST,
    Finite,
    LimitedMessages,
    Model,
    Name,
    NonNegative,
    SamplingFields,
    Stop,
    Text,
    ToolList,
    TopLogprobs,
    about,
    ignored,
    one_of,
)
from mixedkv_server.http.json_body import PlainJSONRoute
from mixedkv_server.models import Described
from mixedkv_server.packing import Long
from mixedkv_server.settings import parse_keep_alive
from mixedkv_server.state import (
    ServerState,
    in_thread,
    model_of,
    packed_answer,
    read_prompt,
    server_state,
    tenant,
)

_MAX_IMAGES = 64
_SIGNATURES = {"/9j/": "jpeg", "iVBOR": "png", "R0lGOD": "gif", "UklGR": "webp"}  # in Base64
_ONLY_ANOTHER_SERVER = "Accepted: it says how Ollama loads a model."


class OllamaOptions(SamplingFields):
    """Options for generating answers. Those about loading a model are ignored."""

    num_predict: Annotated[int, Field(ge=-2, le=INT32_MAX)] | None = about(
        "Tokens of the answer at most; below zero: as many as there is room for."
    )
    stop: Stop | None = None
    repeat_penalty: Annotated[Finite, Field(ge=0, le=RANGES["repeat_penalty"][1])] | None = about(
        "0 is none, as clients send it that mean OpenAI's frequency_penalty."
    )
    num_ctx: NonNegative | None = about("Ignored: the context is the server's `--n-ctx`.")
    numa: Any = about(_ONLY_ANOTHER_SERVER)
    num_batch: Any = about(_ONLY_ANOTHER_SERVER)
    num_gpu: Any = about(_ONLY_ANOTHER_SERVER)
    num_thread: Any = about(_ONLY_ANOTHER_SERVER)
    use_mmap: Any = about(_ONLY_ANOTHER_SERVER)

    def fields(self) -> dict[str, Any]:
        """Return the fields of OpenAI's request."""
        most = self.num_predict
        return {
            **self.model_dump(exclude={"num_predict", "num_ctx", *_LOADING}, exclude_none=True),
            "seed": self.seed if self.seed is not None and self.seed >= 0 else None,
            "max_tokens": most if most is not None and most > 0 else None,
            "repeat_penalty": 1.0 if self.repeat_penalty == 0 else self.repeat_penalty,
        }


_LOADING = ("numa", "num_batch", "num_gpu", "num_thread", "use_mmap")


Stay = Annotated[  # seconds, once it is read
    Annotated[Finite, NUMBER] | Annotated[Text, TEXT],
    one_of("seconds, or a text such as 10m"),
    AfterValidator(parse_keep_alive),
]


class KeepAlive(Model):
    """The fields of all requests that use a model."""

    model: Name | None = None
    keep_alive: Stay | None = about(
        "How long the model stays in memory after this request: seconds, or a text such as 10m; below zero "
        "for ever. Ignored by a server of one model without --keep-alive."
    )


class OllamaRequest(KeepAlive):
    """The fields that /api/chat and /api/generate have in common."""

    stream: bool | None = about("Default: true.")
    options: OllamaOptions | None = None
    format: (
        Annotated[
            Annotated[Literal["", "json"], TEXT] | Annotated[dict[str, Any], OBJECT],
            one_of("json or a JSON Schema"),
        ]
        | None
    ) = about("json, or a JSON Schema that the answer follows.")
    think: (
        Annotated[
            Annotated[bool, FLAG] | Annotated[Literal["low", "medium", "high"], TEXT],
            one_of("true, false, low, medium or high"),
        ]
        | None
    ) = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    @property
    def requested(self) -> OllamaOptions:
        return self.options or OllamaOptions.model_validate({})

    def answer_fields(self) -> dict[str, Any]:
        """Return the fields of OpenAI's chat for generating the answer."""
        form: dict[str, Any] | None = None
        if self.format == "json":
            form = {"type": "json_object"}
        elif isinstance(self.format, dict):
            form = {"type": "json_schema", "json_schema": {"name": "format", "schema": self.format}}
        thinks = None if self.think is None else {"enable_thinking": self.think is not False}
        return {
            **self.requested.fields(),
            "stream": self.stream is not False,
            "response_format": form,
            "chat_template_kwargs": thinks,
            "reasoning_effort": self.think if isinstance(self.think, str) else None,
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs if self.logprobs else None,
        }


Images = Annotated[list[Text], Field(max_length=_MAX_IMAGES, fail_fast=True)]


class OllamaFunction(Model):
    name: Name
    arguments: Annotated[
        Annotated[dict[str, Any], OBJECT] | Annotated[Text, TEXT], one_of("an object, or its JSON")
    ] = Field(default_factory=dict)
    index: Any = ignored()


class OllamaCall(Model):
    id: Name | None = None
    type: Name | None = ignored()
    function: OllamaFunction


class OllamaMessage(Model):
    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    images: Images | None = about("Base64 of image files.")
    tool_calls: ToolList[OllamaCall] | None = None
    tool_name: Name | None = about("Of role tool: the function whose result it is.")
    tool_call_id: Name | None = None


class OllamaChat(OllamaRequest):
    messages: Annotated[
        list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True), LimitedMessages
    ] = Field(default_factory=list)
    tools: ToolList[Tool] | None = None

    tool_choice: AnyChoice | None = about("Ours, as OpenAI has it.")

    def as_chat(self) -> dict[str, Any]:
        """The same of OpenAI's."""
        return {
            **self.answer_fields(),
            "tool_choice": self.tool_choice,
            "messages": _with_calls(self.messages),
            "tools": [tool.model_dump(exclude_none=True) for tool in self.tools or ()] or None,
        }


class OllamaGenerate(OllamaRequest):
    prompt: Text = ""
    suffix: Text | None = about("Comes after the answer, of models made for infilling.")
    system: Text | None = None
    images: Images | None = about("Base64 of image files.")
    raw: bool | None = about("The prompt as it is, without the chat template.")
    # known, but not supported by this server
    template: Text | None = about(REFUSED)
    context: list[Any] | None = about(REFUSED)

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> OllamaGenerate:
        if self.template:
            raise ValueError("template is not supported by this server: render the prompt, and send raw=true")
        if self.context:
            raise ValueError("context is not supported by this server: use /api/chat with all messages")
        if self.is_raw and (self.format or self.images or self.logprobs or self.system):
            raise ValueError(
                "raw and suffix do not go with format, images, logprobs or system: leave one out"
            )
        return self

    @property
    def is_raw(self) -> bool:
        return bool(self.raw or self.suffix)

    def as_chat(self) -> dict[str, Any]:
        """Return the request as a chat of OpenAI's."""
        said = [{"role": "system", "content": self.system}] if self.system else []
        user = {"role": "user", "content": _content(self.prompt, self.images)}
        return {**self.answer_fields(), "messages": [*said, user]}

    def as_completion(self, n_ctx: int) -> dict[str, Any]:
        """Return the request as a completion of OpenAI's, of up to `n_ctx` tokens."""
        fields = {"max_tokens": n_ctx, **{k: v for k, v in self.requested.fields().items() if v is not None}}
        prompt = f"{self.system}\n\n{self.prompt}" if self.system and not self.is_raw else self.prompt
        return {**fields, "stream": self.stream is not False, "prompt": prompt, "suffix": self.suffix}


class OllamaEmbed(KeepAlive):
    input: Annotated[
        Annotated[Text, TEXT] | Annotated[list[Text], Field(max_length=2048, fail_fast=True), LIST],
        TEXT_OR_LIST,
    ]
    truncate: bool | None = about("Cut what is too long; default: true.")
    dimensions: NonNegative | None = None
    options: OllamaOptions | None = ignored()


class OllamaEmbeddings(KeepAlive):
    prompt: Text = ""
    options: OllamaOptions | None = ignored()


class OllamaShow(Model):
    model: Name | None = None
    name: Name | None = about("A former name of model.")
    verbose: bool | None = ignored()


def _with_calls(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form. Calls without ids get one, and a result gets the id of the first
    unanswered call of its function.
    """
    out: list[dict[str, Any]] = []
    unanswered: list[tuple[str, str]] = []  # id and function
    n_calls = 0
    for each in messages:
        message: dict[str, Any] = {"role": each.role, "content": _content(each.content, each.images)}
        if each.thinking:
            message["reasoning_content"] = each.thinking
        if each.tool_calls:
            message["tool_calls"] = []
            for call in each.tool_calls:
                n_calls += 1
                name, arguments = call.function.name, call.function.arguments
                text = arguments if isinstance(arguments, str) else json.dumps(arguments)
                call_id = call.id or f"call{n_calls:05}"  # nine letters and digits, as Mistral requires
                unanswered.append((call_id, name))
                function = {"name": name, "arguments": text}
                message["tool_calls"].append({"id": call_id, "type": "function", "function": function})
        if each.role == "tool":
            answered = (each.tool_call_id, each.tool_name)
            found = next((call for call in unanswered if answered[0] == call[0]), None)
            found = found or next((call for call in unanswered if answered[1] in (None, call[1])), None)
            if found is not None:
                unanswered.remove(found)
            message["tool_call_id"] = found[0] if found is not None else each.tool_call_id
        out.append(message)
    return out


def _content(text: str | None, images: Sequence[str] | None) -> Any:
    if not images:
        return text or ""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": _url(each)}} for each in images]
    return [*parts, {"type": "text", "text": text or ""}]


def _url(image: str) -> str:
    if image.startswith("data:"):
        return image
    kind = next((kind for begin, kind in _SIGNATURES.items() if image.startswith(begin)), "png")
    return f"data:image/{kind};base64,{image}"


router = APIRouter(route_class=PlainJSONRoute)
models_router = APIRouter(route_class=PlainJSONRoute)
_OLLAMA_VERSION = "0.12.11"  # the version whose fields these are; some clients refuse older ones
_NEVER = datetime(2999, 12, 31, 23, 59, 59, tzinfo=timezone.utc)
_MAX_VALUE = 10_000  # characters of a text in a file's metadata that are shown
_LATEST = ":latest"  # tag that Ollama's clients add to a name


@router.post("/api/chat")
async def chat(body: OllamaChat, request: Request) -> Response:
    """Answer a chat, as lines of JSON or whole."""
    return await _answer(request, body, is_empty=not body.messages)


@router.post("/api/generate")
async def generate(body: OllamaGenerate, request: Request) -> Response:
    """Answer a prompt, as lines of JSON or whole."""
    return await _answer(request, body, is_empty=not (body.prompt or body.suffix or body.images))


def named_model(request: Request, name: str | None, **options: Any) -> ServerState:
    """Return the model of a name as `model_of` does. The name may have Ollama's tag."""
    return model_of(request, name.removesuffix(_LATEST) if name else None, **options)


def now() -> str:
    return utc(datetime.now(timezone.utc))


def utc(at: datetime) -> str:
    return at.isoformat().replace("+00:00", "Z")


async def _answer(request: Request, body: OllamaChat | OllamaGenerate, is_empty: bool) -> Response:
    owner = tenant(request)
    if is_empty and body.keep_alive == 0:
        return _unload(request, body)
    server = named_model(request, body.model)
    if is_empty:  # this is how Ollama's clients load a model
        return without_answer(server, body, "load")
    if (n_ctx := body.requested.num_ctx) is not None and n_ctx > server.engine.n_ctx:
        why = f"the context has {server.engine.n_ctx} tokens; serve with --n-ctx {n_ctx}"
        request.app.state.said.ignored_option(request.url.path, "options.num_ctx", why)
    jobs = await read_prompt(request, _jobs, server, body, owner)
    return await respond(request, _Answer(server, body, jobs))


def _unload(request: Request, body: OllamaChat | OllamaGenerate) -> Response:
    """Answer a request to unload a model, which only the router of several models does."""
    server = named_model(request, body.model)
    why = "the model stays loaded; serve with --keep-alive"
    request.app.state.said.ignored_option(request.url.path, "keep_alive", why)
    return without_answer(server, body, "unload")


def without_answer(server: Described, body: OllamaChat | OllamaGenerate, reason: str) -> Response:
    whole = {"model": server.model_name, "created_at": now(), **_said(body, ""), "done": True}
    return JSONResponse({**whole, "done_reason": reason})


def _jobs(server: ServerState, body: OllamaChat | OllamaGenerate, owner: str) -> list[Job]:
    raw = isinstance(body, OllamaGenerate) and (body.is_raw or not server.engine.tokenizer.renders)
    if isinstance(body, OllamaGenerate) and raw:  # a base model continues the prompt as it is
        if body.format or body.images or body.logprobs:
            raise bad_request(
                "format, images and logprobs work in chats, and this is a base model, which continues texts: "
                "leave them out, or serve it with --chat-format chatml",
                "format",
            )
        fields = body.as_completion(server.engine.n_ctx)
        return completion_jobs(server, translated(CompletionRequest, fields), owner)
    return translated_jobs(server, body.as_chat, owner)


def _said(
    body: OllamaRequest, text: str, thought: str = "", calls: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Return the fields for a text chunk of an answer, or for all of it."""
    more = {"thinking": thought} if thought else {}
    if not isinstance(body, OllamaChat):
        return {"response": text, **more}
    message = {"role": "assistant", "content": text, **more}
    return {"message": {**message, "tool_calls": calls} if calls else message}


class _Answer(SentAnswer):
    """Builds Ollama's objects for the answer to one request. Calls come at the end, each whole."""

    headers = NDJSON

    def __init__(self, server: ServerState, body: OllamaChat | OllamaGenerate, jobs: list[Job]) -> None:
        self._body, (self._job,) = body, jobs
        self._parts = self._job.request.reader()
        large = self._parts.is_parsed or bool(body.logprobs)
        super().__init__(server, jobs, streams=body.stream is not False, large=large)

    def whole(self, ends: list[Done]) -> dict[str, Any]:
        (end,) = ends
        self._parts.feed(end.text, last=end.last)
        answer = self._parts.answer
        said = _said(self._body, answer.content, answer.reasoning, self._calls())
        return {**self._head(), **said, **self._logprobs(end), **self._end(end)}

    def takes_long(self, i: int) -> bool:
        return self._parts.takes_long

    def event(self, i: int, event: Delta | Done) -> bytes:
        lines, logprobs = [], self._logprobs(event)
        for part in self._parts.feed(event.text, last=event.last):
            if part.index < 0:
                of_text = logprobs if part.content else {}
                lines.append({**_said(self._body, part.content, part.reasoning), **of_text})
                logprobs = {} if part.content else logprobs
        if isinstance(event, Done):
            if calls := self._calls():
                lines.append(_said(self._body, "", calls=calls))
            lines.append({**_said(self._body, ""), **logprobs, **self._end(event)})
        elif logprobs:
            lines.append({**_said(self._body, ""), **logprobs})
        return b"".join(json_line({**self._head(), "done": False, **line}) for line in lines)

    def idle(self) -> bytes:
        """Return a line without text, since the format has no comments."""
        return json_line({**self._head(), "done": False, **_said(self._body, "")})

    def failed(self, error: ApiError) -> bytes:
        return json_line(_error(error))

    def _head(self) -> dict[str, Any]:
        return {"model": self.server.model_name, "created_at": now()}

    def _calls(self) -> list[dict[str, Any]]:
        return [
            {"id": call.id, "function": {"index": i, "name": call.name, "arguments": call.values}}
            for i, call in enumerate(self._parts.answer.complete_calls)
        ]

    def _logprobs(self, event: Delta | Done) -> dict[str, Any]:
        if not (self._body.logprobs and event.logprobs):
            return {}
        return {"logprobs": chat_logprobs(self.server.engine.detokenizer, event.logprobs)["content"]}

    def _reason(self, end: Done) -> str:
        """Return why the answer ended; calls are no reason in this API."""
        reason = self._parts.answer.finish_reason(end.reason)
        return "stop" if reason == "tool_calls" else reason

    def _end(self, end: Done) -> dict[str, Any]:
        """Return why the answer ended, its tokens, and times in nanoseconds."""
        job, at = self._job, time.perf_counter()
        first = job.t_first if job.t_first is not None else at
        return {
            "done": True,
            "done_reason": self._reason(end),
            "total_duration": _ns(at - job.t_submit),
            "load_duration": 0,
            "prompt_eval_count": job.n_given,
            "prompt_eval_duration": _ns(first - job.t_submit),
            "eval_count": job.n_answer,
            "eval_duration": _ns(at - first),
            "prompt_tokens_details": cached_details([job]),
        }


def _ns(seconds: float) -> int:
    return max(0, round(1e9 * seconds))


@models_router.get("/api/version")
async def version(request: Request) -> Response:
    """Return the version of Ollama whose API this is."""
    tenant(request)
    return JSONResponse({"version": _OLLAMA_VERSION, "mixedkv": __version__})


@models_router.get("/api/tags")
async def tags(request: Request) -> Response:
    """List the models and adapters that are served."""
    tenant(request)
    return JSONResponse({"models": [await in_thread(_listed, each) for each in server_state(request).all]})


@models_router.get("/api/ps")
async def running(request: Request) -> Response:
    """List the models in memory, and when each is unloaded if no request comes."""
    tenant(request)
    models = [
        {
            **await in_thread(_listed, each),
            "expires_at": _expires_at(each.expires_in),
            "size_vram": 0,
            "context_length": each.facts["n_ctx"] or each.facts["embedding_n_ctx"],
        }
        for each in server_state(request).all
        if each.loaded
    ]
    return JSONResponse({"models": models})


def _expires_at(seconds: float) -> str:
    at = datetime.now(timezone.utc).timestamp() + seconds
    if at >= _NEVER.timestamp():
        return utc(_NEVER)
    return utc(datetime.fromtimestamp(at, timezone.utc))


@models_router.post("/api/show")
async def show(body: OllamaShow, request: Request) -> Response:
    """Return the metadata of a model's file, and its capabilities."""
    tenant(request)
    server = named_model(request, body.model or body.name, generates=False)
    return JSONResponse(await in_thread(_shown, server))


@models_router.post("/api/embed")
async def embed_inputs(body: OllamaEmbed, request: Request) -> Response:
    """Return a vector of length 1 for each input."""
    began, inputs = time.perf_counter(), [body.input] if isinstance(body.input, str) else body.input
    server = named_model(request, body.model, generates=False)
    if not any(inputs) and len(inputs) < 2:
        return JSONResponse({"model": server.model_name, "embeddings": []})
    vectors, n_tokens = await _embed(request, server, inputs, body.dimensions, body.truncate is not False)
    answer = {
        "model": server.model_name,
        "embeddings": Long(vector.tolist() for vector in vectors),
        "total_duration": round(1e9 * (time.perf_counter() - began)),
        "load_duration": 0,
        "prompt_eval_count": n_tokens,
    }
    return await packed_answer(request, server, lambda: answer)


@models_router.post("/api/embeddings")
async def embed_prompt(body: OllamaEmbeddings, request: Request) -> Response:
    """Return a vector of length 1, in the form from before /api/embed."""
    server = named_model(request, body.model, generates=False)
    if not body.prompt:
        return JSONResponse({"embedding": []})
    (vector,), _ = await _embed(request, server, [body.prompt], None, True)
    return JSONResponse({"embedding": vector.tolist()})


async def _embed(
    request: Request, server: ServerState, inputs: list[str], dimensions: int | None, truncate: bool
) -> tuple[Vectors, int]:
    owner = tenant(request)
    body = translated(EmbeddingRequest, {"input": inputs, "dimensions": dimensions or None})
    embedder = checked_embedder(server, body)
    read = _cut_tokens if truncate else input_tokens
    return await embed(request, server, embedder, owner, read, body)


def _cut_tokens(server: ServerState, embedder: Embedder, body: EmbeddingRequest) -> list[list[int]]:
    return input_tokens(server, embedder, body, truncate=True)


def _listed(server: Described) -> dict[str, Any]:
    path, digest = server.path, ""
    with suppress(ValueError, OSError):  # the file may be gone or replaced until it is loaded
        digest = fingerprint(path)
    at = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc) if path.exists() else None
    return {
        "name": server.model_name,
        "model": server.model_name,
        "modified_at": at.isoformat() if at else now(),
        "size": server.facts["size_bytes"],
        "digest": digest,
        "details": _details(server),
    }


def _details(server: Described) -> dict[str, Any]:
    family = server.facts["architecture"]
    return {
        "parent_model": server.parent,
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": _short(server.facts["n_params"]),
        "quantization_level": server.facts["quantization"],
    }


def _shown(server: Described) -> dict[str, Any]:
    metadata = server.file_metadata()
    metadata.pop("tokenizer.chat_template", None)
    return {
        "modelfile": f"# served by mixedkv\nFROM {server.path.name}\n",
        "parameters": "",
        "template": server.chat_template,
        "license": str(metadata.get("general.license", "")),
        "details": _details(server),
        "model_info": {**_plain(metadata), "general.parameter_count": server.facts["n_params"]},
        "capabilities": server.capabilities,
        "modified_at": _listed(server)["modified_at"],
    }


def _plain(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata that are numbers or short texts."""
    return {
        key: value
        for key, value in metadata.items()
        if isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= _MAX_VALUE)
    }


def _short(n: int) -> str:
    """Return a number like 134515008 as 134.52M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if n >= size:
            return f"{n / size:.3g}{letter}" if n >= 100 * size else f"{n / size:.2f}{letter}"
    return str(n)


def _error(error: ApiError) -> dict[str, Any]:
    return {"error": error.message}


_LOADS: dict[str, type[OllamaChat | OllamaGenerate]] = {
    "/api/chat": OllamaChat,
    "/api/generate": OllamaGenerate,
}


class OllamaRoutedFields(RoutedFields):
    """What a router reads of Ollama's requests. One without a prompt loads the model, or unloads it where
    `keep_alive` is 0.
    """

    keep_alive: Any = None
    prompt: Any = None
    suffix: Any = None
    images: Any = None
    messages: Any = None

    @property
    def seconds(self) -> float | None:
        try:
            return None if self.keep_alive is None else parse_keep_alive(self.keep_alive)
        except ValueError:  # the model's process refuses it
            return None

    def unload_answer(self, path: str, model: Described) -> Response | None:
        kind = _LOADS.get(path)
        if kind is None or self.seconds != 0 or self.prompt or self.suffix or self.images or self.messages:
            return None
        return without_answer(model, kind.model_construct(), "unload")


API = ForeignAPI(
    generating=router,
    others=models_router,
    errors={"/api/": _error},
    routed={"/api/": OllamaRoutedFields},
    about_models=("/api/tags", "/api/ps", "/api/show", "/api/version"),
    model_tag=_LATEST,
)
