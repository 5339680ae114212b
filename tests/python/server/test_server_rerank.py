"""/v1/rerank: what a classifier's head says to two texts, worked out again from the hidden state below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from mixedkv import Llama
from support.models.zoo import Gguf, Shape
from support.models.zoo.encoder import decoding_ranker, ranker
from support.servers.server import Server, key_file, running

pytestmark = pytest.mark.full

QUERY = "in the end"
DOCUMENTS = ["the hen", "a", "in the there in the", "there is a hen in the inner there", "the hen"]
KEY = "a-key-0123456789abcdef"

ENCODER = ranker(Shape("ranker", "bert", n_head=2, head=32, kv_layers=(), rope="none"))
DECODER = decoding_ranker(Shape("qwen3-ranker", "qwen3", rope="neox"))


@pytest.fixture(scope="module", params=[ENCODER, DECODER], ids=["encoder", "decoder"])
def model(request: Any) -> Gguf:
    g: Gguf = request.param
    return g


@pytest.fixture(scope="module")
def path(model: Gguf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranker") / f"{model.shape.name}.gguf"
    model.write(path)
    return path


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[Server]:
    keys = str(key_file(path.parent, f"one:{KEY}"))
    with running("-m", str(path), "--parallel", "1", "--max-queue", "1", "--api-key-file", keys) as server:
        yield server


def scores(model: Gguf, path: Path, documents: Sequence[str]) -> np.ndarray:
    """By llama-cpp-python's vectors and numpy."""
    is_encoder = model is ENCODER
    pooling = llama_cpp.LLAMA_POOLING_TYPE_CLS if is_encoder else llama_cpp.LLAMA_POOLING_TYPE_LAST
    with Llama(path, embedding=True, pooling_type=pooling, n_ctx=128, n_threads=1, verbose=False) as llm:
        vectors = []
        for document in documents:
            text = f"the query: {QUERY} the document: {document}"
            parts = [QUERY, document] if is_encoder else [text]
            tokens = [llm.tokenize(part.encode(), add_bos=False, special=not is_encoder) for part in parts]
            # the zoo's vocabulary begins a text, and neither ends nor separates one
            ids = [1, *tokens[0], *tokens[1]] if is_encoder else tokens[0]
            vectors.append(hidden(llm, ids))
    x, tensors = np.array(vectors), model.tensors
    if is_encoder:
        x = np.tanh(x @ tensors["cls.weight"].T + tensors["cls.bias"])
        return (x @ tensors["cls.output.weight"].T + tensors["cls.output.bias"])[:, 0]
    x = np.exp(x @ tensors["cls.output.weight"].T)
    return x[:, 0] / x.sum(1)


def hidden(llm: Llama, ids: list[int]) -> np.ndarray:
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    if memory := llama_cpp.llama_get_memory(llm.ctx):
        llama_cpp.llama_memory_clear(memory, True)
    assert llama_cpp.llama_decode(llm.ctx, batch) == 0
    out = np.ctypeslib.as_array(llama_cpp.llama_get_embeddings_seq(llm.ctx, 0), (llm.n_embd(),)).copy()
    llama_cpp.llama_batch_free(batch)
    return out


def rerank(server: Server, **change: Any) -> Any:
    return server.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, **change}, key=KEY)


def test_scores_are_those_of_the_head(server: Server, model: Gguf, path: Path) -> None:
    answer = rerank(server)
    expected = scores(model, path, DOCUMENTS)
    assert np.ptp(expected) > 1e-3, "else nothing is shown"
    given = [(result["index"], result["relevance_score"]) for result in answer["results"]]
    assert sorted(index for index, _ in given) == list(range(len(DOCUMENTS)))
    assert all(np.diff([expected[index] for index, _ in given]) < 1e-5)  # equal ones in any order
    for index, score in given:
        assert score == pytest.approx(expected[index], abs=1e-5)
    assert answer["model"] == model.shape.name
    assert answer["usage"]["prompt_tokens"] > 2 * len(DOCUMENTS)


def test_the_best_ones_with_their_texts(server: Server) -> None:
    whole = rerank(server)["results"]
    best = rerank(server, top_n=2, return_documents=True)["results"]
    assert [each["index"] for each in best] == [each["index"] for each in whole[:2]]
    assert [each["document"]["text"] for each in best] == [DOCUMENTS[each["index"]] for each in best]
    assert "document" not in whole[0]
    assert len(rerank(server, top_n=100)["results"]) == len(DOCUMENTS)


def test_company_does_not_change_a_score(server: Server) -> None:
    many = [f"{i} the hen in " + "there " * (i % 7) for i in range(100)]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda part: rerank(server, documents=part)["results"], (many, many[:5])))
    together = {each["index"]: each["relevance_score"] for each in both[0]}
    for each in both[1]:
        assert each["relevance_score"] == pytest.approx(together[each["index"]], abs=1e-5)


def test_a_model_that_ranks_does_nothing_else(server: Server, model: Gguf) -> None:
    messages = [{"role": "user", "content": "a"}]
    for url, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": messages}),
    ):
        status, answer, _ = server.request("POST", url, body, key=KEY)
        assert (status, answer["error"]["param"]) == (400, "model")
        assert "/v1/rerank" in answer["error"]["message"]
    meta = server.request("GET", f"/v1/models/{model.shape.name}", key=KEY)[1]["meta"]
    assert meta["n_embd"] is None
    assert meta["embedding_n_ctx"] > 0


def test_it_is_counted_as_embeddings_are(server: Server) -> None:
    def inputs() -> float:
        lines = server.metrics().splitlines()
        name = "mixedkv_embedding_inputs_total"
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    before = inputs()
    rerank(server)
    assert inputs() - before == len(DOCUMENTS)


@pytest.mark.parametrize("top_n", [None, 1, 99])
def test_the_form_of_tei(server: Server, top_n: int | None) -> None:
    body = {"query": QUERY, "texts": DOCUMENTS, "top_n": top_n, "return_text": True}
    found = server.post("/rerank", body, key=KEY)
    expected = rerank(server)["results"][:top_n]
    assert [each["index"] for each in found] == [each["index"] for each in expected]
    assert [each["score"] for each in found] == [each["relevance_score"] for each in expected]
    assert all(each["text"] == DOCUMENTS[each["index"]] for each in found)
    assert "text" not in server.post("/rerank", {"query": QUERY, "texts": DOCUMENTS}, key=KEY)[0]


def test_documents_and_texts_exclude_each_other(server: Server) -> None:
    for given in ({}, {"texts": ["a"], "documents": ["a"]}):
        status, answer, _ = server.request("POST", "/rerank", {"query": QUERY, **given}, key=KEY)
        assert status == 400
        assert "texts" in answer["error"]["message"]
