"""Bodies of Ollama's API, and their translation to OpenAI's requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from mixedkv.limits import INT32_MAX, RANGES
from mixedkv.server.api.schemas import AnyChoice, Tool
from mixedkv.server.fields import (
    FLAG,
    LIST,
    MAX_MESSAGES,
    NUMBER,
    OBJECT,
    REFUSED,
    TEXT,
    TEXT_OR_LIST,
    FewMessages,
    Finite,
    Model,
    Name,
    SamplingFields,
    Stop,
    Text,
    ToolList,
    TopLogprobs,
    Whole,
    about,
    ignored,
    one_of,
)
from mixedkv.server.settings import parse_keep_alive

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
    num_ctx: Whole | None = about("Ignored: the context is the server's `--n-ctx`.")
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
    def wanted(self) -> OllamaOptions:
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
            **self.wanted.fields(),
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
    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True), FewMessages] = (
        Field(default_factory=list)
    )
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
        if self.is_raw and (self.format or self.images or self.logprobs):
            raise ValueError("raw and suffix do not go with format, images or logprobs: leave one out")
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
        fields = {"max_tokens": n_ctx, **{k: v for k, v in self.wanted.fields().items() if v is not None}}
        prompt = f"{self.system}\n\n{self.prompt}" if self.system and not self.is_raw else self.prompt
        return {**fields, "stream": self.stream is not False, "prompt": prompt, "suffix": self.suffix}


class OllamaEmbed(KeepAlive):
    input: Annotated[
        Annotated[Text, TEXT] | Annotated[list[Text], Field(max_length=2048, fail_fast=True), LIST],
        TEXT_OR_LIST,
    ]
    truncate: bool | None = about("Cut what is too long; default: true.")
    dimensions: Whole | None = None
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
            wanted = (each.tool_call_id, each.tool_name)
            found = next((call for call in unanswered if wanted[0] == call[0]), None)
            found = found or next((call for call in unanswered if wanted[1] in (None, call[1])), None)
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
