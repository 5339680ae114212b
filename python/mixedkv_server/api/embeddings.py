"""POST /v1/embeddings, and /v1/rerank, which scores how well documents answer a query."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from mixedkv.engine import Embedder
from mixedkv.errors import ClosedError, ContextLengthError, EngineError, ModelReadError, QueueFullError
from mixedkv.limits import INT32_MAX
from mixedkv_server.api.schemas import EmbeddingRequest
from mixedkv_server.api_error import bad_request, from_engine, prompt_error, timed_out
from mixedkv_server.fields import Model, Name, Text, about, ignored
from mixedkv_server.http.json_body import JSONRoute
from mixedkv_server.packing import Long, packed
from mixedkv_server.pending import or_disconnect
from mixedkv_server.state import ServerState, model_of, packed_answer, read_prompt, tenant, time_left

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


_MAX_DOCUMENTS = 2048  # as many as inputs of /v1/embeddings


Documents = Annotated[
    list[Annotated[Text, Field(min_length=1)]],
    Field(min_length=1, max_length=_MAX_DOCUMENTS, fail_fast=True),
]


class RerankRequest(Model):
    """A request to rank documents, in the form of Jina, Cohere and llama-server."""

    query: Annotated[Text, Field(min_length=1)]
    documents: Documents | None = None
    texts: Documents | None = about("documents, in the form of TEI: the answer is then a list, as TEI's.")
    model: Name | None = None
    top_n: Annotated[int, Field(ge=1)] | None = about("Only so many, the best ones.")
    return_documents: bool | None = about("Results have their texts.")
    return_text: bool | None = about("TEI's name of return_documents.")
    user: Name | None = ignored()

    @model_validator(mode="after")
    def _one_of_both(self) -> RerankRequest:
        if (self.documents is None) == (self.texts is None):
            raise ValueError("documents: give them, or texts as TEI takes them, not both")
        return self

    @property
    def all_texts(self) -> list[str]:
        return self.documents or self.texts or []

    @property
    def returns_texts(self) -> bool:
        return bool(self.return_documents or self.return_text)


@router.post("/v1/rerank")
@router.post("/v1/reranking", include_in_schema=False)
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Return a score for each document, the greatest first."""
    owner = tenant(request)
    server = model_of(request, body.model, generates=False)
    embedder = _ranker(server)
    scores, n_tokens = await embed(request, server, embedder, owner, _pairs, body)
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    order = np.argsort(-scores[:, 0], kind="stable").tolist()[: body.top_n]
    if body.texts is not None:
        ranked = Long(_tei_result(body, i, float(scores[i, 0])) for i in order)
        return await packed_answer(request, server, lambda: ranked)
    results = Long(_result(body, i, float(scores[i, 0])) for i in order)
    answer = {"object": "list", "model": server.model_name, "results": results, "usage": usage}
    return await packed_answer(request, server, lambda: answer)


def _result(body: RerankRequest, index: int, score: float) -> dict[str, Any]:
    text = {"document": {"text": body.all_texts[index]}} if body.returns_texts else {}
    return {"index": index, "relevance_score": score, **text}


def _tei_result(body: RerankRequest, index: int, score: float) -> dict[str, Any]:
    text = {"text": body.all_texts[index]} if body.returns_texts else {}
    return {"index": index, "score": score, **text}


def _ranker(server: ServerState) -> Embedder:
    if server.embedder is None or not server.embedder.context.ranks:
        raise bad_request(
            f"the model {server.model_name!r} does not rank texts (its pooling type is not rank): serve one "
            "that was made for it",
            "model",
            "rerank_not_supported",
        )
    return server.embedder


def _pairs(server: ServerState, embedder: Embedder, body: RerankRequest) -> list[list[int]]:
    """Return the tokens of the query with each document."""
    pairs = []
    for i, document in enumerate(body.all_texts):
        try:
            pairs.append(server.engine.tokenizer.pair(body.query, document, n_ctx=embedder.context.n_ctx))
        except ValueError as error:
            raise prompt_error(error, "documents", f"document {i}, or the query: ") from None
        check_length(embedder, len(pairs[-1]), f"document {i} with the query", "documents")
    return pairs
