"""POST /v1/embeddings, and what all APIs that embed texts have in common."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from starlette.responses import Response

from mixedkv.engine import Embedder
from mixedkv.errors import ClosedError, ContextLengthError, EngineError, ModelReadError, QueueFullError
from mixedkv.limits import INT32_MAX
from mixedkv_server.api.schemas import EmbeddingRequest
from mixedkv_server.api_error import bad_request, from_engine, prompt_error, timed_out
from mixedkv_server.http.json_body import JSONRoute
from mixedkv_server.packing import packed
from mixedkv_server.pending import or_disconnect
from mixedkv_server.state import ServerState, model_of, read_prompt, tenant, time_left

router = APIRouter(route_class=JSONRoute)
Vectors = npt.NDArray[np.float32]
_SMALL = 1 << 12  # numbers that are written in a millisecond


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Return a vector of length 1 for each input."""
    owner = tenant(request)
    server = model_of(request, body.model, generates=False)
    embedder = checked_embedder(server, body)
    vectors, n_tokens = await embed(request, server, embedder, owner, input_tokens, body)
    answer = partial(_answer, vectors, body.encoding_format == "base64", server.model_name, n_tokens)
    if vectors.size <= _SMALL:
        return Response("".join(answer()), media_type="application/json")
    return await packed(server.pools, owner, answer)


async def embed(
    request: Request,
    server: ServerState,
    embedder: Embedder,
    owner: str,
    read: Callable[..., list[list[int]]],
    body: Any,
) -> tuple[Vectors, int]:
    """Return the vectors of inputs and their number of tokens. `read` tokenizes them, off the event loop.

    Raises:
        ApiError: there are too many requests, it takes too long, or the engine fails.
    """
    try:
        embedder.check_room(owner)
        inputs = await read_prompt(request, read, server, embedder, body)
        vectors = await or_disconnect(
            request, asyncio.wait_for(embedder.embed(inputs, owner), time_left(request))
        )
    except asyncio.TimeoutError:
        raise timed_out(server.settings.request_timeout) from None
    except (QueueFullError, ClosedError, EngineError, ModelReadError) as error:
        raise from_engine(error) from None
    return vectors, sum(map(len, inputs))


def check_length(embedder: Embedder, n_tokens: int, name: str, param: str) -> None:
    """Check that an input is not empty and fits the context.

    Raises:
        ApiError: 400, the input is empty or too long.
    """
    context = embedder.context
    if not 1 <= n_tokens <= context.n_ctx:
        is_so = "is too large: it has" if n_tokens else "has"
        message = f"{name} {is_so} {n_tokens} tokens, 1 to {context.n_ctx} can be embedded: shorten it"
        if context.n_ctx < context.n_train:
            message += f", or serve with an embedding_n_ctx of up to {context.n_train}"
        raise bad_request(message, param, "context_length_exceeded" if n_tokens else None)


def checked_embedder(server: ServerState, body: EmbeddingRequest) -> Embedder:
    """Return the embedder of a model, if it can give vectors of this size.

    Raises:
        ApiError: 400, the model gives no such vectors.
    """
    if server.embedder is not None and server.embedder.context.ranks:
        raise bad_request(
            f"the model {server.model_name!r} ranks texts, it gives no vectors: use /v1/rerank",
            "model",
            "embeddings_not_supported",
        )
    if server.embedder is None:
        raise bad_request(
            "this server gives no embeddings: serve with --embeddings (MIXEDKV_EMBEDDINGS=1)",
            "model",
            "embeddings_not_supported",
        )
    n_embd = server.embedder.context.n_embd
    if body.dimensions not in (None, n_embd):
        raise bad_request(
            f"dimensions: vectors of this model have {n_embd} and cannot be cut: leave it out", "dimensions"
        )
    return server.embedder


def input_tokens(
    server: ServerState, embedder: Embedder, body: EmbeddingRequest, *, truncate: bool = False
) -> list[list[int]]:
    """Return the token ids of each input. Control tokens are not parsed in texts.

    Args:
        truncate: cut inputs that are too long.

    Raises:
        ApiError: 400.
    """
    context, inputs = embedder.context, []
    for i, item in enumerate(body.inputs):
        if isinstance(item, str):
            n_ctx = INT32_MAX if truncate else context.n_ctx  # a text's length is checked before it is read
            try:
                tokens = server.engine.tokenizer.tokenize(item, n_ctx=n_ctx)
            except ValueError as error:
                too_large = "is too large" if isinstance(error, ContextLengthError) else "cannot be read"
                raise prompt_error(error, "input", f"input {i} {too_large}: ") from None
        else:
            try:
                tokens = server.engine.tokenizer.mixed(item, special=False)
            except ValueError as error:
                raise bad_request(f"input {i}: {str(error).partition(': ')[2]}", "input") from None
        if truncate:
            tokens = tokens[: context.n_ctx]
        check_length(embedder, len(tokens), f"input {i}", "input")
        inputs.append(tokens)
    return inputs


def _answer(vectors: Vectors, as_base64: bool, model: str, n_tokens: int) -> Iterator[str]:
    """Yield OpenAI's object in chunks: many vectors are many megabytes."""
    yield '{"object":"list","data":['
    for i, vector in enumerate(vectors):
        text = _base64(vector) if as_base64 else _numbers(vector)
        yield f'{"," if i else ""}{{"object":"embedding","index":{i},"embedding":{text}}}'
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    yield f'],"model":{json.dumps(model)},"usage":{json.dumps(usage)}}}'


def _base64(vector: Vectors) -> str:
    return f'"{base64.b64encode(vector.astype("<f4").tobytes()).decode()}"'


def _numbers(vector: Vectors) -> str:
    """Write numbers with nine digits, which tell float32 numbers apart."""
    return f"[{','.join(map('{:.9g}'.format, vector.tolist()))}]"
