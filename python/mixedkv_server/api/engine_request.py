"""The way from a body to the engine: `request_of` makes the one `Request` of a body and its tokens, and
`make_jobs` has it checked and prepared.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from mixedkv.chunks.chunk_reuse import ChunkChoice
from mixedkv.engine import Chat, Constraint, Job, RenderedChat, Request, Sampling
from mixedkv.errors import ContextLengthError
from mixedkv.prompts.part import Insert
from mixedkv.sessions import CacheSessionMetadata
from mixedkv_server.api.request_limits import check_request
from mixedkv_server.api.schemas import GenerationFields
from mixedkv_server.api_error import ApiError, bad_request, from_engine
from mixedkv_server.state import ServerState


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedPrompt:
    """A prompt as tokens, and what is known of it besides.

    Attributes:
        tokens: with those of its session before them.
        field: of the body, which errors about the prompt name.
        chat: says how the answer to a chat is constrained and read; None for a raw prompt.
        images: those in the prompt, in order.
        message_ends: ids of messages in the prompt, and how many tokens it has up to the end of each.
    """

    tokens: Sequence[int]
    field: str = "prompt"
    chat: RenderedChat | None = None
    images: Sequence[Insert] = ()
    message_ends: Sequence[tuple[str, int]] = ()


def make_jobs(
    server: ServerState,
    body: GenerationFields,
    prompts: Sequence[TokenizedPrompt],
    owner: str,
    session: CacheSessionMetadata | None = None,
) -> list[Job]:
    """Return `body.n` jobs for each prompt. Not for the event loop, since constraints take time to compile.

    Raises:
        ApiError: 400.
    """
    check_request(
        server,
        body,
        owner,
        [prompt.tokens for prompt in prompts],
        shows_images=any(prompt.images for prompt in prompts),
    )
    try:
        requests = [request_of(server, body, prompt, owner, session) for prompt in prompts]
        return server.engine.prepare(requests, body.n or 1)
    except ContextLengthError as error:
        raise from_engine(error, prompts[0].field) from error
    except ValueError as error:
        raise _bad_field(error) from None


def request_of(
    server: ServerState,
    body: GenerationFields,
    prompt: TokenizedPrompt,
    owner: str,
    session: CacheSessionMetadata | None,
) -> Request:
    """Return the engine's request for the answer to one prompt.

    Raises:
        ApiError: 400, fields conflict or are out of range.
    """
    engine, chat, caches = server.engine, prompt.chat, body.use_kv_cache is not False
    constraint = chat.constraint if chat is not None else None
    most = body.most_tokens
    return Request(
        prompt=prompt.tokens,
        max_tokens=engine.n_ctx if most is None else most,
        sampling=sampling(server, body, constraint or constraint_of(body)),
        tenant=owner,
        session=session.kv_cache_ref if session is not None else None,
        stop=[*body.stops, *(chat.stops if chat is not None else ())],
        stop_tokens=body.stop_token_ids or (),
        min_tokens=body.min_tokens or 0,
        ignore_end=bool(body.ignore_eos),
        n_indent=body.n_indent or 0,
        max_seconds=_seconds(body.t_max_predict_ms),
        stream=bool(body.stream),
        n_logprobs=body.n_logprobs,
        post_sampling=body.post_sampling,
        prompt_logprobs=body.prompt_logprobs,
        reuse=(body.reuse or True) if caches else False,
        reuse_options=None if body.chunks is None else ChunkChoice(**body.chunks.model_dump()),
        store=caches,
        overflow="slide" if body.slides(server.settings.overflow) and not prompt.images else "refuse",
        speculation=body.speculation,
        prediction=body.predicted_text,
        parts=[part for image in prompt.images for part in image.parts],
        thought_budget=_thought_budget(server, body),
        message_ends=prompt.message_ends,
        **(engine.tokenizer.answer_fields(chat, len(prompt.tokens)) if chat is not None else {}),
    )


def context_tokens(server: ServerState, session: Any, *, long: bool = False) -> list[int]:
    """Return the tokens of a session's prompt, for messages up to the answer. If `long`, they need not fit
    the context.
    """
    if session.prompt is not None:
        return server.engine.tokenizer.prompt(session.prompt, long=long)
    messages = [message.model_dump(exclude_none=True) for message in session.messages]
    return server.engine.tokenizer.render(Chat(messages=messages), long=long)[0]


_SAMPLING = {each.name for each in fields(Sampling)} & GenerationFields.model_fields.keys() - {
    "seed",
    "logit_bias",
    "dry_sequence_breakers",
    "samplers",
}


def sampling(server: ServerState, body: GenerationFields, constraint: Constraint | None) -> Sampling:
    """Return the sampling settings of a request.

    Raises:
        ApiError: 400, a value is out of its range.
    """
    seed = body.seed if body.seed is not None else server.sampling.get("seed")
    seed = secrets.randbits(32) if seed is None else seed
    bias = tuple(_biases(server, body.logit_bias or {}))
    given: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    if body.dry_sequence_breakers is not None:
        given["dry_sequence_breakers"] = tuple(body.dry_sequence_breakers)
    if body.samplers is not None:
        given["samplers"] = tuple(body.samplers)
    given = {**server.sampling, **given, "seed": seed % 2**32, "logit_bias": bias}
    try:
        return Sampling(**given, constraint=constraint)
    except ValueError as error:
        raise _bad_field(error) from None


def _biases(server: ServerState, given: Mapping[str, float | Literal[False]]) -> Iterator[tuple[int, float]]:
    """Yield tokens and what to add to their logits. A text stands for each of its tokens, as in llama-server.

    Raises:
        ApiError: 400, a text has no tokens.
    """
    for key, value in given.items():
        bias = -math.inf if value is False else value
        if key.isascii() and key.removeprefix("-").isdigit():
            yield int(key), bias
            continue
        try:
            tokens = server.engine.tokenizer.tokenize(key, start=False, special=False)
        except ValueError as error:
            raise bad_request(f"logit_bias: {key!r:.80}: {error}", "logit_bias") from None
        yield from ((token, bias) for token in tokens)


def constraint_of(body: GenerationFields) -> Constraint | None:
    """Return the constraint of an answer: the schema, the grammar or the regular expression of a body.

    Raises:
        ApiError: 400, there is more than one.
    """
    schema = body.answer_schema
    given = [schema] if schema is not None else []
    if body.grammar is not None:
        given.append(Constraint("gbnf", body.grammar, "grammar"))
    if body.regex is not None:
        given.append(Constraint("regex", body.regex, "regex"))
    if len(given) > 1:
        one, other = given[-1].name, given[0].name
        raise bad_request(f"{one} and {other} both say what the answer looks like: give one", one)
    return given[0] if given else None


def _thought_budget(server: ServerState, body: GenerationFields) -> int | None:
    """Return after how many tokens a thought is ended; None for never."""
    default = server.settings.reasoning_budget
    given = body.thought_budget
    return given if given is not None else default if default >= 0 else None


def _seconds(milliseconds: int | None) -> float | None:
    return milliseconds / 1000 if milliseconds is not None and milliseconds > 0 else None


def _bad_field(error: ValueError) -> ApiError:
    """Return the error for a message that begins with the field."""
    return bad_request(str(error), str(error).partition(":")[0].partition("=")[0])
