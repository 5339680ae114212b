"""Bodies of requests: OpenAI's fields and our own, strictly checked."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from mixedkv.chunks.chunk_reuse import Repair
from mixedkv.engine import Constraint
from mixedkv.limits import INT32_MAX, SAMPLERS
from mixedkv.prompts.overflow import Overflow
from mixedkv.prompts.part import MARK
from mixedkv.sessions import CreateContextCacheRequest
from mixedkv.sessions.records import MAX_TTL, check_n_fields
from mixedkv_server.fields import (
    FLAG,
    LIST,
    LISTS,
    MAX_SEED,
    MAX_STOPS,
    NUMBER,
    OBJECT,
    PREFIX_FOUND,
    REFUSED,
    TEXT,
    TEXTS,
    CallId,
    Finite,
    FunctionName,
    Id,
    LimitedFields,
    MessageList,
    Model,
    Name,
    NonNegative,
    Positive,
    SamplingFields,
    Seed,
    Stop,
    Text,
    TextOrList,
    Tokens,
    ToolList,
    TopLogprobs,
    about,
    check_n_messages,
    ignored,
    one_of,
    ranged,
)

MAX_CHOICES = 64
_MAX_INPUTS = 2048  # OpenAI's
_MAX_VARIABLES = 64  # of a chat template
_IMAGES = ("image", "image_url", "input_image")
_DOCUMENTS = ("document", "search_result")  # as texts: Anthropic's
_MEDIA = ("image", "audio", "video", "file", "document", "container_upload")


def _check_media(content: Any, taken: tuple[str, ...]) -> Any:
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind in taken:
            continue
        if kind.removeprefix("input_").startswith(_MEDIA):
            also = [
                name
                for name, kinds in (("images", _IMAGES), ("documents of text", _DOCUMENTS))
                if kinds[0] in taken
            ]
            what = f"texts and {' and '.join(also)} only (no audio or files)" if also else "texts only"
            raise ValueError(f"{kind[:40]}: this server takes {what} here: leave it out")
    return content


TextOnly = BeforeValidator(partial(_check_media, taken=()))
TextOrImages = BeforeValidator(partial(_check_media, taken=_IMAGES))
TextOrDocuments = BeforeValidator(partial(_check_media, taken=_DOCUMENTS))
TextImagesOrDocuments = BeforeValidator(partial(_check_media, taken=(*_IMAGES, *_DOCUMENTS)))


class TextPart(Model):
    type: Literal["text", "input_text", "output_text"]
    text: Text


class RefusalPart(Model):
    """The text that an assistant said in place of an answer."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


class ImageURL(Model):
    url: Text
    detail: Name | None = ignored()


class ImagePart(Model):
    type: Literal["image_url"]
    image_url: ImageURL


Part = Annotated[TextPart | RefusalPart | ImagePart, Field(discriminator="type")]


class CalledFunction(Model):
    name: Name
    arguments: Text


class ToolCall(Model):
    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Model):
    """A message of a chat: OpenAI's fields, and our own."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[TextOrList[Part] | None, TextOrImages] = None
    name: Name | None = None
    refusal: Text | None = None
    message_id: Id | None = None
    # fields of answers that clients may send back in the next turn
    reasoning_content: Text | None = None
    audio: None = None
    function_call: None = None
    tool_calls: ToolList[ToolCall] | None = None
    tool_call_id: Name | None = about("Of role tool: the call that it answers.")
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def text(self) -> str:
        """The message's text, with `prompts.part.MARK` in the place of each image."""
        if isinstance(self.content, list):
            return "".join(MARK if isinstance(part, ImagePart) else part.text for part in self.content)
        return self.content or self.refusal or ""

    @property
    def images(self) -> list[str]:
        """The URLs of the message's images."""
        parts = self.content if isinstance(self.content, list) else ()
        return [part.image_url.url for part in parts if isinstance(part, ImagePart)]

    @model_validator(mode="after")
    def _only_users_show_images(self) -> Message:
        if self.role != "user" and self.images:
            raise ValueError(f"content: an image in a message of role {self.role}: send it as user")
        return self


Messages = MessageList[Message]


class StreamOptions(Model):
    include_usage: bool | None = None
    include_obfuscation: bool | None = ignored()


class ChunkFields(Model):
    """Settings of one request for the passages that it reuses."""

    repair: Repair | None = about("How their edges are repaired; default: the server's.")
    ratio: Annotated[Finite, Field(ge=0, le=1)] | None = about(
        "Share of the reused tokens that is evaluated again."
    )
    overlap_k: Annotated[int, Field(ge=0, le=1024)] | None = about(
        "Tokens at the edge of a passage that are evaluated again."
    )
    chunk_size: Positive | None = about(
        "At least the server's: shorter passages than half of it are not reused."
    )
    boundary_window: NonNegative | None = about(
        "Tokens by which an edge moves at most to the end of a sentence."
    )


class Function(Model):
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = about("JSON Schema of an object.")
    strict: bool | None = about("Calls follow their schema with or without it.")


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
    content: TextOrList[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


_BIAS = 100


def _as_biases(value: Any) -> Any:
    """Read `[[15043, -1.5], [" blue", false]]`, which llama-server takes as well, as OpenAI's object. Several
    biases of one token add up.
    """
    if not isinstance(value, list):
        return value
    if not all(isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (int, str) for pair in value):
        raise ValueError("give pairs of a token's id or a text, and a number or false; or an object")
    sums: dict[str, Any] = {}
    for token, bias in value:
        before = sums.get(key := str(token), 0)
        if before is False or not _is_number(bias) or not _is_number(before):
            sums[key] = False if before is False else bias
        else:
            sums[key] = min(_BIAS, max(-_BIAS, before + bias)) if key in sums else bias
    return sums


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


Bias = Annotated[
    Annotated[Finite, Field(ge=-_BIAS, le=_BIAS), NUMBER] | Annotated[Literal[False], FLAG],
    one_of(f"a number from -{_BIAS} to {_BIAS}, or false for a token that never comes"),
]
Biases = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=256)], Bias],
    LimitedFields,
    BeforeValidator(_as_biases),
]
Pattern = Annotated[Text, Field(max_length=65536)]


def _as_names(value: Any) -> Any:
    """Read llama.cpp's letters for samplers as their names."""
    if not isinstance(value, str):
        return value
    names = {letter: name for name, letter in SAMPLERS.items()}
    if unknown := [letter for letter in value if letter not in names]:
        raise ValueError(f"{unknown[0]!r} is no sampler's letter: give names, or letters of {''.join(names)}")
    return [names[letter] for letter in value]


def _known_sampler(name: str) -> str:
    name = _ALSO_NAMED.get(name.replace("-", "_"), name)
    if name not in SAMPLERS:
        raise ValueError(f"there is no such sampler: use {', '.join(SAMPLERS)}")
    return name


_ALSO_NAMED = {"typical_p": "typ_p", "typical": "typ_p", "nucleus": "top_p", "temp": "temperature"}
Samplers = Annotated[
    list[Annotated[Name, AfterValidator(_known_sampler)]],
    Field(max_length=64, fail_fast=True),
    BeforeValidator(_as_names),
]


class AdapterScale(Model):
    """An adapter as llama-server names it, by its place among `--lora`, and its strength."""

    id: NonNegative
    scale: Finite


def _not_none_at_all(n: int) -> int:
    if n == 0:
        raise ValueError("0 asks for no answer: give 1 or more, or -1 for as many as fit")
    return n


MostTokens = Annotated[int, Field(ge=-1, le=INT32_MAX), AfterValidator(_not_none_at_all)]


class GenerationFields(SamplingFields):
    """The fields that chat and completions have in common."""

    model: Name | None = None
    max_tokens: MostTokens | None = None
    n_predict: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = about(
        "llama-server's name of max_tokens. -1: as many as fit; 0: the prompt is evaluated and kept."
    )
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | None = None
    logit_bias: Biases | None = about(
        "By tokens, ids or texts: a number that is added, or false for never; also a list of pairs."
    )
    # ours and llama.cpp's
    grammar: Pattern | None = about("GBNF the answer follows.")
    regex: Pattern | None = about("Regular expression the whole answer matches.")
    min_tokens: NonNegative | None = about("Of the answer before the model may end it.")
    stop_token_ids: Annotated[list[NonNegative], Field(max_length=MAX_STOPS, fail_fast=True)] | None = about(
        "Tokens that end the answer; they are not part of it."
    )
    prompt_logprobs: TopLogprobs | None = about(
        "Of the prompt's tokens, as vLLM gives them: all of it is then evaluated."
    )
    return_progress: bool | None = about("A stream says how far its prompt is.")
    ignore_eos: bool | None = about("Go on to max_tokens.")
    samplers: Samplers | None = about("Which samplers choose, in this order; default: all, in llama.cpp's.")
    n_indent: Annotated[int, Field(ge=0, le=1000)] | None = about(
        "The answer ends where a line begins with fewer spaces and tabs."
    )
    t_max_predict_ms: Annotated[int, Field(ge=-1, le=MAX_SEED)] | None = about(
        "The answer ends with the line in which so many milliseconds since its first token are over."
    )
    timings_per_token: bool | None = about(
        "`timings`, as llama-server has them, in each event of a stream and in a whole answer."
    )
    verbose: bool | None = about("A whole answer has `__verbose`, what /completion tells of an answer.")
    lora: Annotated[list[AdapterScale], Field(max_length=64, fail_fast=True)] | None = about(
        "The adapter that answers, with the strength that it is served with; none: the model without one."
    )
    speculation: Literal["off", "prompt-lookup", "draft-model", "mtp"] | None = about(
        "How what comes next is guessed; default: as the server was started."
    )
    use_kv_cache: bool | None = about("False: evaluate the whole prompt, keep no rows.")
    reuse: Literal["exact", "prefix", "chunks"] | None = about(
        "Which stored KV this answer may start from; default: the server's `--reuse`."
    )
    chunks: ChunkFields | None = about("How passages are found and repaired, with `--reuse chunks`.")
    overflow: Overflow | None = about(
        "slide drops the middle of what does not fit; default: the server's `--overflow`."
    )
    session_id: Id | None = about("Of /v1/context: its prompt goes before this one.")
    append: bool | None = about("This turn becomes part of the session; default: as it was made.")
    session_version: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = about(
        "Answer only if the session is at this version."
    )
    prompt_cache_key: Name | None = about(PREFIX_FOUND)
    user: Name | None = ignored()
    service_tier: Name | None = ignored()
    safety_identifier: Name | None = ignored()
    prompt_cache_retention: Name | None = ignored()

    @model_validator(mode="after")
    def _go_together(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream=true only")
        if self.verbose and self.stream:
            raise ValueError("verbose goes without stream only")
        if self.return_progress and not self.stream:
            raise ValueError("return_progress goes with stream=true only")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs goes without stream only")
        for name in ("append", "session_version"):
            if getattr(self, name) is not None and self.session_id is None:
                raise ValueError(f"{name} goes with session_id only")
        return self

    default_tokens: ClassVar[int | None] = None  # of an answer; None for as many as fit

    def slides(self, default: Overflow) -> bool:
        """Return whether the middle of a prompt that does not fit the context is dropped."""
        return (self.overflow or default) == "slide"

    @property
    def n_logprobs(self) -> int | None:
        """Number of the likeliest tokens to tell at each place; None for no log probabilities."""
        return None

    @property
    def post_sampling(self) -> bool:
        """True if log probabilities are of what the samplers left to draw from."""
        return False

    @property
    def answer_schema(self) -> Constraint | None:
        """The JSON Schema that the answer follows."""
        return None

    @property
    def predicted_text(self) -> str:
        """A text that the answer may contain."""
        return ""

    @property
    def thought_budget(self) -> int | None:
        """Tokens after which a thought is ended; None for the server's."""
        return None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def most_tokens(self) -> int | None:
        """The maximum length of the answer; None for as many as fit."""
        given = (
            self.n_predict,
            getattr(self, "max_completion_tokens", None),
            self.max_tokens,
            self.default_tokens,
        )
        found = next((n for n in given if n is not None), -1)
        return None if found < 0 else found


Metadata = Annotated[dict[Name, Annotated[Text, Field(max_length=4096)]], LimitedFields]
Variables = Annotated[
    dict[Annotated[str, Field(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]{0,63}$")], Any],
    BeforeValidator(lambda value: check_n_fields(value, _MAX_VARIABLES)),
]


class ChatFields(Model):
    """The fields that a prompt is made of."""

    messages: Messages
    tools: ToolList[Tool] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = about(
        "Given to the chat template; none: no thoughts, where it can do that."
    )
    chat_template_kwargs: Variables | None = about("Variables of the chat template.")
    continue_final_message: bool | None = about(
        "The last message is the answer's beginning; the answer goes on from it. Default, as in "
        "llama-server: if it is the assistant's, without calls."
    )
    add_generation_prompt: bool | None = about(
        "True, which is so unless the answer goes on from the last message; false is refused else."
    )

    @property
    def goes_on(self) -> bool:
        """True if the answer goes on from the last message unless the request says something else."""
        return False

    def _ends_with_answer(self) -> bool:
        last = self.messages[-1]
        return last.role == "assistant" and not last.tool_calls


class ChatRequest(ChatFields, GenerationFields):
    max_completion_tokens: MostTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | None = about("llama-server's short form of response_format.")
    tool_choice: AnyChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_budget_tokens: NonNegative | None = about("Tokens after which a thought is ended.")
    store: bool | None = ignored()
    metadata: Metadata | None = ignored()
    verbosity: Name | None = ignored()
    prediction: Prediction | None = about("Drafts of the answer, evaluated at once.")
    # known, but not what this server does: see `_refuse_unsupported`
    functions: list[Any] | None = about(REFUSED)
    function_call: Any = about(REFUSED)
    modalities: list[Any] | None = about(REFUSED)
    audio: Any = about(REFUSED)
    web_search_options: Any = about(REFUSED)

    @property
    def goes_on(self) -> bool:
        return self.session_id is None and self._ends_with_answer()

    @property
    def n_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def answer_schema(self) -> Constraint | None:
        if self.json_schema is not None:
            return Constraint("json_schema", json.dumps(self.json_schema), "json_schema")
        requested = self.response_format
        if requested is None or requested.type == "text":
            return None
        schema = requested.json_schema.schema_ if requested.json_schema is not None else requested.schema_
        text = json.dumps({"type": "object"} if schema is None else schema)
        return Constraint("json_schema", text, "response_format")

    @property
    def predicted_text(self) -> str:
        return self.prediction.text if self.prediction is not None else ""

    @property
    def thought_budget(self) -> int | None:
        return self.reasoning_budget_tokens

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
        if self.json_schema is not None and self.response_format is not None:
            raise ValueError("json_schema and response_format both say what the answer looks like: give one")
        return self


class PromptObject(Model):
    """A text with images as llama-server takes it, each at its `<__media__>`."""

    prompt_string: Text
    multimodal_data: Annotated[list[Text], Field(max_length=64, fail_fast=True)] | None = about(
        "Image files in Base64."
    )


def _kind_of_prompt(value: Any) -> str:
    if isinstance(value, list):
        return "~mixed" if any(isinstance(part, str) for part in value) else "~list"
    return "~text" if isinstance(value, str) else "~object" if isinstance(value, dict | Model) else "~other"


Mixed = Annotated[list[NonNegative | Text], Field(min_length=1, fail_fast=True)]
_FORMS = "give a text, token ids and texts, an object with prompt_string, or a list"
OnePrompt = Annotated[
    Annotated[Text, TEXT]
    | Annotated[Tokens, LIST]
    | Annotated[Mixed, Tag("~mixed")]
    | Annotated[PromptObject, OBJECT],
    Discriminator(_kind_of_prompt, custom_error_type="kind", custom_error_message=_FORMS),
]


def as_prompts(value: Any) -> Any:
    """Return one prompt as a list of one. A list with numbers in it is one prompt, as in llama-server."""
    several = isinstance(value, list) and not any(isinstance(part, int) for part in value)
    return value if several else [value]


_PROMPTS = Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)
Prompt = Annotated[
    Annotated[Text, TEXT]
    | Annotated[list[Text], _PROMPTS, TEXTS]
    | Annotated[Tokens, LIST]
    | Annotated[list[Tokens], _PROMPTS, LISTS],
    one_of("a text, a list of texts, a list of token ids, or a list of such lists", by_items=True),
]


def prompts_of(prompt: Prompt) -> list[str | list[int]]:
    """Return the prompts of a field that has one or several."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return cast("list[str | list[int]]", [prompt])
    return list(cast("list[str | list[int]]", prompt))


class CompletionRequest(GenerationFields):
    default_tokens: ClassVar[int | None] = 16  # OpenAI's

    prompt: Prompt
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = about(REFUSED)
    suffix: Text | None = about("Comes after the answer, of models made for infilling.")

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
    def n_logprobs(self) -> int | None:
        return self.logprobs

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
    tools: ToolList[Tool] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> WarmRequest:
        if self.tools and self.messages is None:
            raise ValueError("tools goes with messages only")
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class ContextRequest(CreateContextCacheRequest):
    """A context to keep, and if `max_tokens` is given an answer to it in the same call, sampled with
    `temperature` and `seed`.
    """

    max_tokens: Positive | None = None
    temperature: Finite | None = ranged("temperature")
    seed: Seed | None = None

    _check_n_messages = field_validator("messages", mode="before")(check_n_messages)

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
    ttl: Annotated[int, Field(ge=1, le=MAX_TTL)]


class TextContent(Model):
    """A text in the parts of a message."""

    content: Annotated[list[TextPart], Field(min_length=1, fail_fast=True), TextOnly]


def _kind_of_input(value: Any) -> str:
    has_content = isinstance(value, TextContent) or (isinstance(value, dict) and "content" in value)
    return "~content" if has_content else _kind_of_prompt(value)


OneInput = Annotated[
    Annotated[Text, Field(min_length=1), TEXT]
    | Annotated[Tokens, LIST]
    | Annotated[Mixed, Tag("~mixed")]
    | Annotated[TextContent, Tag("~content")]
    | Annotated[PromptObject, OBJECT],
    Discriminator(_kind_of_input, custom_error_type="kind", custom_error_message=_FORMS),
]


class EmbeddingRequest(Model):
    input: Annotated[
        list[OneInput],
        Field(min_length=1, max_length=_MAX_INPUTS, fail_fast=True),
        BeforeValidator(as_prompts, json_schema_input_type=OneInput | list[OneInput]),
    ]
    model: Name | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    user: Name | None = ignored()

    @field_validator("input", mode="before")
    @classmethod
    def _check_inputs(cls, value: Any) -> Any:
        """Check the inputs before their types, each of which would report an error of its own."""
        if value in ("", []):
            raise ValueError("it is empty: give a text, a list of texts, or token ids")
        if isinstance(value, list) and not any(isinstance(item, int) for item in value):
            if len(value) > _MAX_INPUTS:
                raise ValueError(
                    f"it has {len(value)} inputs, at most {_MAX_INPUTS} are taken: send several requests"
                )
            if empty := [i for i, item in enumerate(value) if item in ("", [])]:
                raise ValueError(f"input {empty[0]} is empty: leave it out")
        return value

    @field_validator("input")
    @classmethod
    def _without_images(cls, value: list[Any]) -> list[Any]:
        if any(isinstance(each, PromptObject) and each.multimodal_data for each in value):
            raise ValueError("multimodal_data: this server embeds texts only: leave it out")
        return value

    @property
    def inputs(self) -> list[str | list[int | str]]:
        return [_as_input(each) for each in self.input]


def _as_input(given: Any) -> Any:
    if isinstance(given, PromptObject):
        return given.prompt_string
    return "".join(part.text for part in given.content) if isinstance(given, TextContent) else given
