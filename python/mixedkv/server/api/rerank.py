"""POST /v1/rerank: scores how well documents answer a query, with a ranking model."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from mixedkv.engine.embed.embedder import Embedder
from mixedkv.server.api.embeddings import check_length, embed
from mixedkv.server.api.fields import IGNORED, Model, Name, Text
from mixedkv.server.api_error import bad_request, prompt_error
from mixedkv.server.http.json_body import JSONRoute
from mixedkv.server.state import ServerState, model_of, tenant

router = APIRouter(route_class=JSONRoute)
_MAX_DOCUMENTS = 2048  # as many as inputs of /v1/embeddings


class RerankRequest(Model):
    """A request to rank documents, in the form of Jina, Cohere and llama-server."""

    query: Annotated[Text, Field(min_length=1)]
    documents: Annotated[
        list[Annotated[Text, Field(min_length=1)]],
        Field(min_length=1, max_length=_MAX_DOCUMENTS, fail_fast=True),
    ]
    model: Name | None = None
    top_n: Annotated[int, Field(ge=1)] | None = Field(None, description="Only so many, the best ones.")
    return_documents: bool | None = Field(None, description="Results have their texts.")
    user: Name | None = Field(None, description=IGNORED)


@router.post("/v1/rerank")
@router.post("/v1/reranking", include_in_schema=False)
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Return a score for each document, the greatest first."""
    owner = tenant(request)
    server = model_of(request, body.model, generates=False)
    embedder = _ranker(server)
    scores, n_tokens = await embed(request, server, embedder, owner, _pairs, body)
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    results = [
        _result(body, i, float(scores[i, 0])) for i in np.argsort(-scores[:, 0], kind="stable").tolist()
    ]
    return JSONResponse(
        {"object": "list", "model": server.model_name, "results": results[: body.top_n], "usage": usage}
    )


def _result(body: RerankRequest, index: int, score: float) -> dict[str, Any]:
    text = {"document": {"text": body.documents[index]}} if body.return_documents else {}
    return {"index": index, "relevance_score": score, **text}


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
    for i, document in enumerate(body.documents):
        try:
            pairs.append(server.engine.tokenizer.pair(body.query, document, n_ctx=embedder.context.n_ctx))
        except ValueError as error:
            raise prompt_error(error, "documents", f"document {i}, or the query: ") from None
        check_length(embedder, len(pairs[-1]), f"document {i} with the query", "documents")
    return pairs
