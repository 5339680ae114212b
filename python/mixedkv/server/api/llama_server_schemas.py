"""Bodies of requests of llama-server's own API."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator

from mixedkv.limits import INT32_MAX
from mixedkv.server.api.fields import MAX_FIELDS, Few, Finite, Model, Name, Text
from mixedkv.server.api.schemas import GenerationFields, Prompt, prompts_of

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
    input_extra: Annotated[list[ExtraFile], Field(max_length=MAX_FIELDS, fail_fast=True)] | None = None
    prompt: Text | None = Field(None, description="The beginning of what is missing.")
