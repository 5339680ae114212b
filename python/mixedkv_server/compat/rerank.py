"""POST /v1/rerank, which scores how well documents answer a query. Requests and answers have the form of
Jina, Cohere and llama-server; with `texts` in place of `documents`, that of text-embeddings-inference (TEI).
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from mixedkv.engine import Embedder
from mixedkv_server.api.embeddings import check_length, embed
from mixedkv_server.api_error import bad_request, prompt_error
from mixedkv_server.compat.foreign_api import ForeignAPI
from mixedkv_server.fields import Model, Name, Text, about, ignored
from mixedkv_server.http.json_body import JSONRoute
from mixedkv_server.packing import Long
from mixedkv_server.state import ServerState, model_of, packed_answer, tenant

router = APIRouter(route_class=JSONRoute)

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


API = ForeignAPI(others=router)
