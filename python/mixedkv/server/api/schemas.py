"""Bodies of requests: OpenAI's fields and our own, strictly checked."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import AliasChoices, BeforeValidator, Field, field_validator, model_validator

from mixedkv.chunks.chunk_reuse import Repair
from mixedkv.limits import INT32_MAX
from mixedkv.prompts.overflow import Overflow
from mixedkv.server.api.chat_message import Messages, TextPart
from mixedkv.server.api.fields import (
    LIST,
    LISTS,
    MAX_SEED,
    MAX_STOPS,
    MAX_TOOLS,
    OBJECT,
    PREFIX_FOUND,
    REFUSED,
    TEXT,
    TEXT_OR_LIST,
    TEXTS,
    Few,
    Finite,
    Id,
    Model,
    Name,
    SamplingFields,
    Stop,
    Text,
    Token,
    Tokens,
    few,
    few_messages,
    one_of,
)
from mixedkv.server.unknown_fields import IGNORED
from mixedkv.sessions import CreateContextCacheRequest

_MAX_CHOICES = 64
_MAX_INPUTS = 2048  # OpenAI's
_MAX_VARIABLES = 64  # of a chat template


class StreamOptions(Model):
    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description=IGNORED)


class ChunkFields(Model):
    """Settings of one request for the passages that it reuses."""

    repair: Repair | None = Field(None, description="How their edges are repaired; default: the server's.")
    ratio: Annotated[Finite, Field(ge=0, le=1)] | None = Field(
        None, description="Share of the reused tokens that is evaluated again."
    )
    overlap_k: Annotated[int, Field(ge=0, le=1024)] | None = Field(
        None, description="Tokens at the edge of a passage that are evaluated again."
    )
    chunk_size: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = Field(
        None, description="At least the server's: shorter passages than half of it are not reused."
    )
    boundary_window: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = Field(
        None, description="Tokens by which an edge moves at most to the end of a sentence."
    )


class Function(Model):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of an object.")
    strict: bool | None = Field(None, description="Calls follow their schema with or without it.")


class Tool(Model):
    type: Literal["function"]
    function: Function


class NamedFunction(Model):
    name: Name


class NamedTool(Model):
    type: Literal["function"] = "function"
    function: NamedFunction


AnyChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], TEXT] | Annotated[NamedTool, OBJECT],
    one_of("none, auto, required, or a function"),
]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class JsonSchemaFormat(Model):
    name: Name = "schema"
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Model):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="With json_object: llama.cpp's way to give a schema."
    )

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError("json_schema with a schema is needed for type json_schema")
        return self


class Prediction(Model):
    """Text that the answer may be, or much of it."""

    type: Literal["content"]
    content: Annotated[
        Annotated[Text, TEXT] | Annotated[list[TextPart], Field(fail_fast=True), LIST], TEXT_OR_LIST
    ]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class GenerationFields(SamplingFields):
    """The fields that chat and completions have in common."""

    model: Name | None = None
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | None = None
    logit_bias: (
        Annotated[dict[Annotated[str, Field(max_length=10)], Annotated[Finite, Field(ge=-100, le=100)]], Few]
        | None
    ) = None
    # ours and llama.cpp's
    grammar: Annotated[Text, Field(max_length=65536)] | None = Field(
        None, description="GBNF the answer follows."
    )
    regex: Annotated[Text, Field(max_length=65536)] | None = Field(
        None, description="Regular expression the whole answer matches."
    )
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = Field(
        None, description="Of the answer before the model may end it."
    )
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOPS, fail_fast=True)] | None = Field(
        None, description="Tokens that end the answer; they are not part of it."
    )
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="Of the prompt's tokens, as vLLM gives them: all of it is then evaluated."
    )
    return_progress: bool | None = Field(None, description="A stream says how far its prompt is.")
    ignore_eos: bool | None = Field(None, description="Go on to max_tokens.")
    speculation: Literal["off", "prompt-lookup", "draft-model", "mtp"] | None = Field(
        None, description="How what comes next is guessed; default: as the server was started."
    )
    use_kv_cache: bool | None = Field(None, description="False: evaluate the whole prompt, keep no rows.")
    reuse: Literal["exact", "prefix", "chunks"] | None = Field(
        None, description="Which stored KV this answer may start from; default: the server's `--reuse`."
    )
    chunks: ChunkFields | None = Field(
        None, description="How passages are found and repaired, with `--reuse chunks`."
    )
    overflow: Overflow | None = Field(
        None, description="slide drops the middle of what does not fit; default: the server's `--overflow`."
    )
    session_id: Id | None = Field(None, description="Of /v1/context: its prompt goes before this one.")
    append: bool | None = Field(
        None, description="This turn becomes part of the session; default: as it was made."
    )
    session_version: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = Field(
        None, description="Answer only if the session is at this version."
    )
    prompt_cache_key: Name | None = Field(None, description=PREFIX_FOUND)
    user: Name | None = Field(None, description=IGNORED)
    service_tier: Name | None = Field(None, description=IGNORED)
    safety_identifier: Name | None = Field(None, description=IGNORED)
    prompt_cache_retention: Name | None = Field(None, description=IGNORED)

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream=true only")
        if self.return_progress and not self.stream:
            raise ValueError("return_progress goes with stream=true only")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs goes without stream only")
        return self

    @model_validator(mode="after")
    def _needs_a_session(self) -> GenerationFields:
        for name in ("append", "session_version"):
            if getattr(self, name) is not None and self.session_id is None:
                raise ValueError(f"{name} goes with session_id only")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


Metadata = Annotated[dict[Name, Annotated[Text, Field(max_length=4096)]], Few]
Variables = Annotated[
    dict[Annotated[str, Field(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]{0,63}$")], Any],
    BeforeValidator(lambda value: few(value, _MAX_VARIABLES)),
]


class ChatFields(Model):
    """The fields that a prompt is made of."""

    messages: Messages
    tools: Tools | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="Given to the chat template; none: no thoughts, where it can do that."
    )
    chat_template_kwargs: Variables | None = Field(None, description="Variables of the chat template.")
    continue_final_message: bool | None = Field(
        None, description="The last message is the answer's beginning; the answer goes on from it."
    )


class ChatRequest(ChatFields, GenerationFields):
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tool_choice: AnyChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_budget_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = Field(
        None, description="Tokens after which a thought is ended."
    )
    store: bool | None = Field(None, description=IGNORED)
    metadata: Metadata | None = Field(None, description=IGNORED)
    verbosity: Name | None = Field(None, description=IGNORED)
    prediction: Prediction | None = Field(None, description="Drafts of the answer, evaluated at once.")
    # known, but not what this server does: see `_refuse_unsupported`
    functions: list[Any] | None = Field(None, description=REFUSED)
    function_call: Any = Field(None, description=REFUSED)
    modalities: list[Any] | None = Field(None, description=REFUSED)
    audio: Any = Field(None, description=REFUSED)
    web_search_options: Any = Field(None, description=REFUSED)

    @property
    def names_answers(self) -> bool:
        """True if answers have a `message_id`: if it was asked for, or the chat's messages have ids."""
        return bool(self.use_kv_cache) or any(message.message_id for message in self.messages)

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> ChatRequest:
        """Refuse fields that ask for another kind of answer than text."""
        for name in ("functions", "audio", "web_search_options"):
            if getattr(self, name) not in (None, []):
                raise ValueError(f"{name} is not supported by this server: leave it out")
        if self.function_call not in (None, "none", "auto"):
            raise ValueError("function_call is not supported by this server: use tools and tool_choice")
        if self.modalities not in (None, ["text"]):
            raise ValueError("modalities: this server answers in text only")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs=true only")
        return self


_PROMPTS = Field(min_length=1, max_length=_MAX_CHOICES, fail_fast=True)
Prompt = Annotated[
    Annotated[Text, TEXT]
    | Annotated[list[Text], _PROMPTS, TEXTS]
    | Annotated[Tokens, LIST]
    | Annotated[list[Tokens], _PROMPTS, LISTS],
    one_of("a text, a list of texts, a list of token ids, or a list of such lists", by_items=True),
]


def prompts_of(prompt: Prompt) -> list[str | list[int]]:
    """Return the prompts of a field that has one or several."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return list(cast("list[str | list[int]]", prompt))


class CompletionRequest(GenerationFields):
    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] | None = Field(None, description=REFUSED)
    suffix: Text | None = Field(None, description="Comes after the answer, of models made for infilling.")

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> CompletionRequest:
        if self.suffix and not (isinstance(self.prompt, str) and self.session_id is None):
            raise ValueError("suffix goes with one prompt that is a text, and without session_id")
        if self.best_of is not None and self.best_of > (self.n or 1):
            raise ValueError("best_of is not supported by this server: ask for n answers and choose")
        if self.echo and self.logprobs is not None and self.session_id is not None:
            raise ValueError("echo with logprobs does not go with session_id: leave one out")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        return prompts_of(self.prompt)


class WarmRequest(Model):
    """A prompt to evaluate and keep: requests that start with it then do not wait for it."""

    model: Name | None = None
    prompt: (
        Annotated[Annotated[Text, TEXT] | Annotated[Tokens, LIST], one_of("a text or a list of token ids")]
        | None
    ) = Field(None, validation_alias=AliasChoices("prompt", "text"))
    messages: Messages | None = None
    tools: Tools | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> WarmRequest:
        if self.tools and self.messages is None:
            raise ValueError("tools goes with messages only")
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class TokenizeRequest(Model):
    model: Name | None = None
    content: Text
    add_special: bool = Field(False, description="The text begins a prompt: with the tokens that do that.")
    parse_special: bool = Field(True, description="Control tokens are read as such.")
    with_pieces: bool = False


class DetokenizeRequest(Model):
    model: Name | None = None
    tokens: Annotated[list[Token], Field(fail_fast=True)]


class ApplyTemplateRequest(ChatFields):
    model: Name | None = None


class ContextRequest(CreateContextCacheRequest):
    """A context to keep, and if `max_tokens` is given an answer to it in the same call, sampled with
    `temperature` and `seed`.
    """

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=100)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None

    _few_messages = field_validator("messages", mode="before")(few_messages)

    @property
    def context(self) -> CreateContextCacheRequest:
        """Return the part of the request that is kept."""
        fields = {name: getattr(self, name) for name in CreateContextCacheRequest.model_fields}
        return CreateContextCacheRequest.model_construct(**fields)

    @model_validator(mode="after")
    def _answered_once(self) -> ContextRequest:
        if self.max_tokens is not None and self.mode == "append":
            raise ValueError("max_tokens goes with mode=prefix: ask with session_id for answers to append")
        return self


class ContextPatch(Model):
    ttl: Annotated[int, Field(ge=1, le=365 * 24 * 3600)]


EmbeddingInput = (
    Annotated[Text, Field(min_length=1)]
    | Annotated[
        list[Annotated[Text, Field(min_length=1)]],
        Field(min_length=1, max_length=_MAX_INPUTS, fail_fast=True),
    ]
    | Tokens
    | Annotated[list[Tokens], Field(min_length=1, max_length=_MAX_INPUTS, fail_fast=True)]
)


class EmbeddingRequest(Model):
    input: EmbeddingInput
    model: Name | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    user: Name | None = Field(None, description=IGNORED)

    @field_validator("input", mode="before")
    @classmethod
    def _check_numbers(cls, value: Any) -> Any:
        """Check the inputs before their types, each of which would report an error of its own."""
        if value in ("", []):
            raise ValueError("it is empty: give a text, a list of texts, or token ids")
        if isinstance(value, str):
            return value
        kinds = {type(item) for item in value} if isinstance(value, list) else set()
        if kinds not in ({str}, {int}, {list}):
            raise ValueError("give a text, a list of texts, a list of token ids, or a list of such lists")
        if kinds != {int}:
            if len(value) > _MAX_INPUTS:
                raise ValueError(
                    f"it has {len(value)} inputs, at most {_MAX_INPUTS} are taken: send several requests"
                )
            if empty := [i for i, item in enumerate(value) if not item]:
                raise ValueError(f"input {empty[0]} is empty: leave it out")
        return value

    @property
    def inputs(self) -> list[str | list[int]]:
        one = isinstance(self.input, str) or isinstance(self.input[0], int)
        return [self.input] if one else self.input  # type: ignore[list-item, return-value]
