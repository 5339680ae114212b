"""Strict types for the fields of bodies."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    Tag,
    model_validator,
)
from typing_extensions import Self

from mixedkv.ids import MAX_LENGTH, PATTERN
from mixedkv.limits import INT32_MAX, RANGES, check_depth
from mixedkv.sessions.records import check_n_fields

IGNORED = "Accepted and ignored."  # beginning of the description of a field without effect
MAX_SEED = 2**63 - 1
MAX_STOPS = 16
MAX_TOOLS = 128  # OpenAI's
MAX_MESSAGES = 4096  # of a request
_MAX_ENTRIES = 4096  # fields of logit_bias and metadata


def _encodable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("text with half a surrogate pair cannot be encoded as UTF-8") from None
    return text


def check_n_messages(value: Any) -> Any:
    """Check the number of messages or items."""
    if isinstance(value, list) and len(value) > MAX_MESSAGES:
        raise ValueError(
            f"it has {len(value)} entries, at most {MAX_MESSAGES} are taken: leave out the oldest"
        )
    return value


_T = TypeVar("_T")
Text = Annotated[str, AfterValidator(_encodable)]
LimitedFields = BeforeValidator(lambda value: check_n_fields(value, _MAX_ENTRIES))
LimitedMessages = BeforeValidator(check_n_messages)
Finite = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[int, Field(ge=0, le=INT32_MAX)]
Positive = Annotated[int, Field(ge=1, le=INT32_MAX)]
TopLogprobs = Annotated[int, Field(ge=0, le=20)]
Name = Annotated[Text, Field(max_length=256)]
CallId = Annotated[Name, Field(min_length=1)]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Id = Annotated[str, Field(min_length=1, max_length=MAX_LENGTH, pattern=f"^{PATTERN}$")]
StopText = Annotated[Text, Field(min_length=1, max_length=1000)]
StopTexts = Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)]
Breaker = Annotated[Text, Field(min_length=1, max_length=40, pattern=r"^[^\x00]*$")]
Breakers = Annotated[list[Breaker], Field(max_length=MAX_STOPS, fail_fast=True)]
Tokens = Annotated[list[NonNegative], Field(min_length=1, fail_fast=True)]
ToolList = Annotated[list[_T], Field(max_length=MAX_TOOLS, fail_fast=True)]
MessageList = Annotated[
    list[_T], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), LimitedMessages
]


def about(description: str) -> Any:
    """Return a field that may be left out, with what the reference says of it."""
    return Field(None, description=description)


def ignored() -> Any:
    """Return a field that is accepted and has no effect."""
    return about(IGNORED)


class Model(BaseModel):
    # hide_input: error messages never quote a prompt
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True, protected_namespaces=())

    _check_n_fields = model_validator(mode="before")(check_n_fields)


# Tags of the members of a union, so that only the one that a value may be reports an error. `place` takes
# them off.
_TAG = "~"
_KINDS = (
    (str, "text"),
    (bool, "flag"),
    ((int, float), "number"),
    (list, "list"),
    ((dict, BaseModel), "object"),
)
TEXT, FLAG, NUMBER, LIST, OBJECT = (Tag(_TAG + kind) for _, kind in _KINDS)
TEXTS, LISTS = Tag("~texts"), Tag("~lists")


def _kind(value: Any) -> str:
    return _TAG + next((kind for types, kind in _KINDS if isinstance(value, types)), "other")


def _kind_of_items(value: Any) -> str:
    """Return the kind of a value; of a list of texts or of lists, by its first item, one of its own."""
    inner = _kind(value[0]) if isinstance(value, list) and value else ""
    return f"{inner}s" if inner in ("~text", "~list") else _kind(value)


def one_of(what: str, *, by_items: bool = False) -> Discriminator:
    """Return what tells the members of a union apart.

    Args:
        what: the kinds of values, for the error of a value of another kind.
        by_items: lists of texts and lists of lists are kinds of their own.
    """
    kind = _kind_of_items if by_items else _kind
    return Discriminator(kind, custom_error_type="kind", custom_error_message=f"give {what}")


def place(loc: Iterable[int | str]) -> str:
    """Return the place of an error, without the tags of unions."""
    return ".".join(str(part) for part in loc if not str(part).startswith((_TAG, "function-")))


TEXT_OR_LIST = one_of("a text or a list")
TextOrList = Annotated[Annotated[Text, TEXT] | Annotated[list[_T], Field(fail_fast=True), LIST], TEXT_OR_LIST]
Stop = Annotated[Annotated[StopText, TEXT] | Annotated[StopTexts, LIST], TEXT_OR_LIST]
# vLLM and others switch it off with -1
TopK = Annotated[int, Field(ge=-1, le=INT32_MAX), AfterValidator(lambda k: max(0, k))]
Seed = Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)]


def ranged(name: str) -> Any:
    """Return a field of sampling that may be left out, within the range of its name."""
    low, high = RANGES[name]
    return Field(None, ge=low, le=high)


class SamplingFields(Model):
    """The fields that say how tokens are chosen."""

    temperature: Finite | None = ranged("temperature")
    top_k: TopK | None = None
    top_p: Finite | None = ranged("top_p")
    min_p: Finite | None = ranged("min_p")
    typical_p: Finite | None = ranged("typical_p")
    top_n_sigma: Finite | None = ranged("top_n_sigma")
    xtc_probability: Finite | None = ranged("xtc_probability")
    xtc_threshold: Finite | None = ranged("xtc_threshold")
    dynatemp_range: Finite | None = ranged("dynatemp_range")
    dynatemp_exponent: Finite | None = ranged("dynatemp_exponent")
    dry_multiplier: Finite | None = ranged("dry_multiplier")
    dry_base: Finite | None = ranged("dry_base")
    dry_allowed_length: int | None = ranged("dry_allowed_length")
    dry_penalty_last_n: int | None = ranged("dry_penalty_last_n")
    dry_sequence_breakers: Breakers | None = None
    mirostat: int | None = ranged("mirostat")
    mirostat_tau: Finite | None = ranged("mirostat_tau")
    mirostat_eta: Finite | None = ranged("mirostat_eta")
    adaptive_target: Finite | None = ranged("adaptive_target")
    adaptive_decay: Finite | None = ranged("adaptive_decay")
    repeat_penalty: Finite | None = ranged("repeat_penalty")
    repeat_last_n: int | None = Field(
        None,
        ge=RANGES["repeat_last_n"][0],
        le=INT32_MAX,
        description="Tokens that repeat_penalty looks at; 0: none, -1: the whole context. Default: 64.",
    )
    presence_penalty: Finite | None = ranged("presence_penalty")
    frequency_penalty: Finite | None = ranged("frequency_penalty")
    seed: Seed | None = about("Below zero, where llama-server and Ollama have it so: another one each time.")


_MAX_VARIABLES = 1 << 16  # characters of chat_template_kwargs
_OURS = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
_VARIABLE = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,63}")


def check_variables(variables: dict[str, Any]) -> None:
    """Check variables that are given to a chat template.

    Raises:
        ValueError: one is the server's to set, or they are too large or no JSON.
    """
    try:
        check_depth(variables, "")
        text = json.dumps(variables, ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except ValueError as error:
        raise ValueError(str(error).removeprefix(": ")) from None
    if len(text) > _MAX_VARIABLES:
        raise ValueError(f"{len(text)} characters are more than {_MAX_VARIABLES}: say less")
    for name in variables:
        if name in _OURS:
            raise ValueError(f"{name} is the server's to say: leave it out")
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r:.80} is no name of a variable: use letters, digits and _")
    if not isinstance(variables.get("enable_thinking", True), bool):
        raise ValueError("enable_thinking: give true or false")


# docs/openai-fields.md is made from descriptions and IGNORED
REFUSED = "Refused unless it asks for what this server does anyway."
PREFIX_FOUND = f"{IGNORED} The longest prefix is found without it."


_LETTERS = re.compile(r"[a-zA-Z][a-zA-Z_]*")


class WithoutHosted(Model):
    """A body from which `drop_hosted` takes tools, items and blocks that only a hosted service has: an agent
    that asks for them is answered all the same.

    Attributes:
        dropped: the names of what was dropped, as in `tools[].web_search`.
    """

    _dropped: list[str] = PrivateAttr(default_factory=list)

    @property
    def dropped(self) -> list[str]:
        return self._dropped

    @classmethod
    def drop_hosted(cls, body: dict[str, Any], filtered: Filtered) -> dict[str, Any]:
        """Return a body without what is hosted."""
        raise NotImplementedError

    @model_validator(mode="wrap")
    @classmethod
    def _drop(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        filtered = Filtered()
        found = handler(cls.drop_hosted(dict(value), filtered) if isinstance(value, dict) else value)
        found._dropped = filtered.dropped
        return found


class Filtered:
    """Filters lists, and notes in `dropped` what is left out."""

    def __init__(self) -> None:
        self.dropped: list[str] = []

    def of(self, where: str, parts: Any, ours: Collection[str | None]) -> Any:
        """Return a list without the objects whose `type` is none of ours; anything else as it is."""
        if not isinstance(parts, list):
            return parts
        hosted = [isinstance(part, dict) and _is_hosted(part.get("type"), ours) for part in parts]
        names = (_name(part.get("type")) for part, is_hosted in zip(parts, hosted, strict=True) if is_hosted)
        self.dropped += [f"{where}.{name}" for name in names]
        return [part for part, is_hosted in zip(parts, hosted, strict=True) if not is_hosted]


def _is_hosted(kind: Any, ours: Collection[str | None]) -> bool:
    return (kind is None or isinstance(kind, str)) and kind not in ours


def _name(kind: str | None) -> str:
    """Return a kind without its version: web_search_20250305 is web_search."""
    found = _LETTERS.match(kind or "")
    return found[0].rstrip("_")[:40] if found else "unknown"
