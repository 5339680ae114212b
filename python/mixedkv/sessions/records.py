"""Models of what goes into and comes out of `ContextCacheManager`: pydantic, strict, unknown fields refused.

Names follow the context cache of AIBrix (vllm-project/aibrix, design/ep-1248.md), with what was left open
there: messages, the time to live in answers, and who owns a session.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from mixedkv.ids import check_id, check_session_id

DEFAULT_TTL = 3600
MAX_TTL = 365 * 24 * 3600
MAX_MESSAGES = 100_000
MAX_FIELDS = 256  # of an object
MAX_CHARACTERS = 16 * 1024 * 1024

SessionId = Annotated[str, AfterValidator(lambda value: check_id("session_id", value))]
KvCacheRef = Annotated[str, AfterValidator(lambda value: check_session_id(check_id("kv_cache_ref", value)))]
MessageId = Annotated[str, AfterValidator(lambda value: check_id("message_id", value))]
Mode = Literal["prefix", "append"]
Ttl = Annotated[int, Field(ge=1, le=MAX_TTL)]
Text = Annotated[str, Field(max_length=MAX_CHARACTERS)]


def check_n_fields(value: Any, most: int = MAX_FIELDS) -> Any:
    """Refuse too many fields: each unknown one would give an error of its own, of a kilobyte."""
    if isinstance(value, dict) and len(value) > most:
        raise ValueError(f"it has {len(value)} fields, at most {most} are taken: leave some out")
    return value


class _Model(BaseModel):
    # hide_input: an error message never repeats a prompt
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    _check_n_fields = model_validator(mode="before")(check_n_fields)


class ContextMessage(_Model):
    """A chat message in OpenAI's form, text only."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | None = None
    message_id: MessageId | None = None
    name: str | None = Field(default=None, max_length=MAX_CHARACTERS)
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = Field(default=None, max_length=MAX_CHARACTERS)
    reasoning_content: Text | None = None


class CreateContextCacheRequest(_Model):
    """A context to keep: a raw `prompt` or chat `messages`, for `ttl` seconds.

    Without `session_id` one is made; a caller's own is taken as it is, see `ids.check_id`. With the mode
    "append" answered turns become part of it.
    """

    model: str = Field(min_length=1, max_length=MAX_CHARACTERS)
    prompt: Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)] | None = None
    messages: (
        Annotated[list[ContextMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = None
    ttl: Ttl = DEFAULT_TTL
    session_id: SessionId | None = None
    mode: Mode = "prefix"

    @model_validator(mode="after")
    def _one_content(self) -> CreateContextCacheRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class CacheSessionMetadata(_Model):
    """Record of a session. Times are Unix times in seconds.

    Attributes:
        model_id: the model the context was given to; its KV is of no use to another.
        kv_cache_ref: what its entries in a `KVStore` are filed under (`save(session=kv_cache_ref)`). Unlike
            `session_id` never used twice.
        n_tokens: tokens of the context, 0 while not known.
        prompt, messages: the context itself, so that KV which was evicted can be computed again.
        mode: whether turns become part of it unless they say otherwise.
        version: how often its content was changed.
    """

    session_id: SessionId
    tenant: str
    model_id: str
    kv_cache_ref: KvCacheRef
    created: float
    ttl: Ttl
    expires_at: float
    n_tokens: int = Field(default=0, ge=0)
    prompt: str | None = None
    messages: list[ContextMessage] | None = None
    mode: Mode = "prefix"
    version: int = Field(default=0, ge=0)


class Usage(_Model):
    """Tokens as OpenAI counts them: `prompt_tokens` is the whole prompt."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(default=0, ge=0)
    total_tokens: int = Field(ge=0)


class CreateCacheResponse(_Model):
    """A session that is registered now."""

    id: str
    object: Literal["context_cache"] = "context_cache"
    session_id: SessionId
    model: str
    created: int
    ttl: int = DEFAULT_TTL
    expires_at: int = 0
    n_tokens: int = 0
    usage: Usage


class DeleteCacheResponse(_Model):
    """A session that is gone, and with it its KV and the key that could read it."""

    session_id: SessionId
    object: Literal["context_cache.deleted"] = "context_cache.deleted"
    status: Literal["success"] = "success"
    deleted: Literal[True] = True


class ErrorResponse(_Model):
    """Why something was not done. `code` is for programs: "session_not_found", "session_exists",
    "session_changed" or "session_quota".
    """

    detail: str
    code: Literal["session_not_found", "session_exists", "session_changed", "session_quota"]


def explain(error: ValidationError) -> str:
    """Explain in one line what each wrong field should be, without repeating the input."""
    problems = []
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        field = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        problems.append(f"{field}: {message}" if field else message)
    return "; ".join(problems)
