"""/v1/embeddings: vectors as llama-cpp-python gives them, between the steps of what else is served."""

from __future__ import annotations

import base64
import http.client
import json
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import openai
import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.engine.embed.embedding_context import EmbeddingContext, InputSpan
from mixedkv.model.gguf_file import read_model_file
from support.patience import PATIENCE, wait_for
from support.servers.server import MODEL, Server, running

pytestmark = pytest.mark.full

TEXTS = ["The harbour", "Once upon a time", "a", "She said <|im_end|> and 「left」.", "one two three " * 25]
LIMIT = 300  # tokens of an input; a slice has more
SAME = 1e-3  # an element: which tokens are evaluated together depends on times, and sums are rounded by that


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--n-ctx", "2048", "--embeddings", "--embedding-n-ctx", str(LIMIT)) as server:
        yield server


@pytest.fixture(scope="module")
def bert(zoo_path: Callable[[str], Path]) -> Iterator[Server]:
    with running("-m", str(zoo_path("bert"))) as server:
        yield server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return client_of(server)


def client_of(server: Server, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, **options)


def vectors_of(server: Server, texts: Any, model: str = MODEL, **options: Any) -> np.ndarray:
    answer = client_of(server).embeddings.create(model=model, input=texts, **options)
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return np.array([item.embedding for item in answer.data])


def by_llama(path: Path, texts: Sequence[str], pooling: int) -> np.ndarray:
    llm = Llama(
        path, embedding=True, pooling_type=pooling, n_ctx=512, n_batch=512, n_threads=1, verbose=False
    )
    with llm:
        return np.array(llm.embed(list(texts), normalize=True, truncate=False))


def test_layers_are_streamed_for_both_contexts(server: Server) -> None:
    options = ("--embeddings", "--embedding-n-ctx", str(LIMIT), "--stream-layers", "2")
    body = {"prompt": "The harbour", "max_tokens": 12, "temperature": 0}
    with running("--n-ctx", "2048", *options) as streamed:
        assert np.abs(vectors_of(streamed, TEXTS) - vectors_of(server, TEXTS)).max() < 0.01
        texts = [each.post("/v1/completions", body)["choices"][0]["text"] for each in (streamed, server)]
        assert texts[0] == texts[1]
        assert np.abs(vectors_of(streamed, TEXTS) - vectors_of(server, TEXTS)).max() < 0.01


def error_of(server: Server, body: Any) -> tuple[int, Any]:
    status, answer, _ = server.request("POST", "/v1/embeddings", {"model": MODEL, **body})
    return status, answer["error"]


# --- values ---


def test_vectors_are_those_of_llama_cpp_python(server: Server) -> None:
    expected = by_llama(model_path(), TEXTS, llama_cpp.LLAMA_POOLING_TYPE_MEAN)
    actual = vectors_of(server, TEXTS)
    assert np.abs(actual - expected).max() < SAME
    assert np.linalg.norm(actual, axis=1) == pytest.approx(1, abs=1e-6)
    assert np.abs(actual[0] - actual[1]).max() > 0.01  # another text is another vector


def test_vectors_of_an_encoder_are_those_of_llama_cpp_python(
    bert: Server, zoo_path: Callable[[str], Path]
) -> None:
    texts = ["the hen", "a", "in the " * 8]
    expected = by_llama(zoo_path("bert"), texts, llama_cpp.LLAMA_POOLING_TYPE_UNSPECIFIED)  # the model's own
    assert np.abs(vectors_of(bert, texts, "bert") - expected).max() < SAME


def test_company_does_not_change_a_vector(server: Server, bert: Server) -> None:
    for each, model in ((server, MODEL), (bert, "bert")):
        texts = [f"{i} the hen in " + "there " * (i % 9) for i in range(150)]
        together = vectors_of(each, texts, model)
        some = [0, 1, 70, 149]
        alone = np.concatenate([vectors_of(each, texts[i], model) for i in some])
        assert np.abs(together[some] - alone).max() < SAME


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("name", ["llama-64", "lfm2", "gemma2"])
def test_an_input_in_pieces_has_the_same_vector(
    zoo_path: Callable[[str], Path], name: str, pooling: str
) -> None:
    path, file = zoo_path(name), read_model_file(zoo_path(name))
    file.metadata[f"{file.architecture}.pooling_type"] = ["none", "mean", "cls", "last"].index(pooling)
    with Llama(path, kv="f16", n_ctx=256, n_threads=1, verbose=False) as llm:
        tokens = [1 + i * 7 % 250 for i in range(100)]
        context = EmbeddingContext(llm, file, n_ctx=128, n_batch=128)
        whole = context.join(list(context.evaluate([InputSpan(tokens, 0, True)])), [100])
        parts, sizes = [], [40, 1, 59]
        # beside others, as slices come
        parts.append(context.evaluate([InputSpan([5, 6], 0, True), InputSpan(tokens[:40], 0, False)])[1])
        parts.append(context.evaluate([InputSpan(tokens[40:41], 40, False)])[0])
        parts.append(context.evaluate([InputSpan(tokens[41:], 41, True), InputSpan([7, 8, 9], 0, True)])[0])
        assert np.abs(context.join(parts, sizes) - whole).max() < 1e-4
        # what was given up leaves nothing behind
        context.evaluate([InputSpan(tokens[:40], 0, False)])
        again = context.join(list(context.evaluate([InputSpan(tokens, 0, True)])), [100])
        assert np.abs(again - whole).max() < 1e-5


def test_many_inputs_fit_beside_one_that_fills_the_context(zoo_path: Callable[[str], Path]) -> None:
    path = zoo_path("llama-64")
    with Llama(path, kv="f16", n_ctx=256, n_threads=1, verbose=False) as llm:
        context = EmbeddingContext(llm, read_model_file(path), n_ctx=512, n_batch=128)
        tokens = [1 + i * 7 % 250 for i in range(512)]
        for first in range(0, 448, 64):
            context.evaluate([InputSpan(tokens[first : first + 64], first, False)])
        many = [InputSpan([10 + i], 0, True) for i in range(context.n_seq - 2)]
        end, next_one = InputSpan(tokens[448:], 448, True), InputSpan(tokens[:2], 0, False)
        vectors = context.evaluate([end, *many, next_one])
        alone = context.evaluate(many[-1:])
        assert np.abs(vectors[-2] - alone[0]).max() < 1e-4


def test_base64_is_the_same_numbers(server: Server) -> None:
    def data(encoding: str) -> Any:
        body = {"model": MODEL, "input": TEXTS[:2], "encoding_format": encoding}
        return [item["embedding"] for item in server.post("/v1/embeddings", body)["data"]]

    packed = [np.frombuffer(base64.b64decode(text), "<f4") for text in data("base64")]
    assert np.array_equal(np.array(packed), np.array(data("float"), np.float32))


def test_every_form_of_input(server: Server, client: openai.OpenAI) -> None:
    with Llama(model_path(), n_ctx=128, verbose=False) as llm:
        ids = [llm.tokenize(text.encode()) for text in TEXTS[:3]]
    expected = vectors_of(server, TEXTS[:3])
    for given, vectors in ((TEXTS[0], expected[:1]), (ids[1], expected[1:2]), (ids, expected)):
        answer = client.embeddings.create(model=MODEL, input=given)
        assert (answer.object, answer.model) == ("list", MODEL)
        assert np.abs(np.array([item.embedding for item in answer.data]) - vectors).max() < SAME
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    vectors_of(server, "x", dimensions=expected.shape[1], user="me")
    assert server.request("GET", "/v1/models")[1]["data"][0]["meta"]["n_embd"] == expected.shape[1]


def test_the_forms_of_llama_server(server: Server) -> None:
    ids = server.post("/tokenize", {"content": TEXTS[0], "add_special": True})["tokens"]
    rest = server.post("/detokenize", {"tokens": ids[3:]})["content"]
    first, second = TEXTS[0][:5], TEXTS[0][5:]
    parts = {"content": [{"type": "text", "text": first}, {"type": "text", "text": second}]}
    given = [TEXTS[0], ids, [*ids[:3], rest], {"prompt_string": TEXTS[0]}, parts]

    def vectors(given: Any) -> np.ndarray:
        data = server.post("/v1/embeddings", {"input": given})["data"]
        return np.array([item["embedding"] for item in data])

    found = vectors(given)
    assert len(found) == len(given)
    assert np.abs(found - found[0]).max() < SAME
    for alone in ([*ids[:3], rest], {"prompt_string": TEXTS[0]}, parts):
        assert np.abs(vectors(alone) - found[:1]).max() < SAME


# --- refusals ---


def test_without_the_option_the_refusal_names_it() -> None:
    with running("--n-ctx", "512") as server:
        status, error = error_of(server, {"input": "a"})
        assert (status, error["code"]) == (400, "embeddings_not_supported")
        assert "--embeddings" in error["message"]


@pytest.mark.nightly
def test_options_that_the_model_cannot_have_end_the_start(
    zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    warm = tmp_path / "warm"
    warm.touch()
    for options in (
        ["--embedding-n-ctx", "129"],
        ["--warm", str(warm)],
        ["--store", str(tmp_path / "store")],
    ):
        server = Server("-m", str(zoo_path("bert")), *options)
        assert server.process.wait(PATIENCE) != 0
        server.stop()
        assert options[0].strip("-") in server.log
        assert "Traceback" not in server.log


# --- a model that only embeds ---


def test_a_model_that_only_embeds_says_so(bert: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/context", {"prompt": "a", "ttl": 60, "model": "bert"}),
        ("/v1/warm", {"prompt": "a"}),
    ):
        status, answer, _ = bert.request("POST", path, body)
        assert (status, answer["error"]["code"]) == (400, "generation_not_supported")
        assert "/v1/embeddings" in answer["error"]["message"]
    assert bert.stats()["cache"]["cells_used"] == 0
    assert bert.status("GET", "/metrics") == 200
    assert bert.request("GET", "/v1/models/bert")[1]["meta"]["embedding_n_ctx"] == 128


def test_tokens_and_properties_of_a_model_that_only_embeds(bert: Server) -> None:
    """Clients of llama-server ask for them to cut texts before they embed them."""
    tokens = bert.post("/tokenize", {"content": "hello", "add_special": True})["tokens"]
    assert len(tokens) >= 3
    assert bert.post("/detokenize", {"tokens": tokens[1:-1]})["content"]
    _, props, _ = bert.request("GET", "/props")
    assert props["default_generation_settings"]["n_ctx"] == 128
    assert bert.status("POST", "/apply-template", {"messages": [{"role": "user", "content": "a"}]}) == 400


def test_an_encoder_takes_its_longest_input(bert: Server) -> None:
    assert len(vectors_of(bert, [[5] * 128, [6], [7] * 128], "bert")) == 3
    status, answer, _ = bert.request("POST", "/v1/embeddings", {"input": [5] * 129})
    assert status == 400
    assert "1 to 128" in answer["error"]["message"]
    assert "embedding_n_ctx" not in answer["error"]["message"]  # more would not help
    assert bert.stop() == 0


# --- beside others ---


def metrics(server: Server, *names: str) -> list[float]:
    """Counters as they were at one moment."""
    text = server.metrics().splitlines()
    return [
        sum(float(line.split()[-1]) for line in text if line.startswith(f"mixedkv_{name}")) for name in names
    ]


def metric(server: Server, name: str) -> float:
    return metrics(server, name)[0]


def in_background(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread and where its result, or what it raised, will be."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


@contextmanager
def asking(server: Server, texts: list[str]) -> Iterator[socket.socket]:
    """A client that goes at the end without its answer, and its connection."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    body = json.dumps({"model": MODEL, "input": texts})
    connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
    yield connection.sock
    connection.close()


def long_list(n: int, n_sentences: int = 5) -> list[str]:
    return [f"Number {i}: " + "the ship left the harbour in the morning. " * n_sentences for i in range(n)]


ENDLESS = long_list(2048, 14)  # for many seconds


@pytest.mark.nightly
def test_a_stream_goes_on_while_many_inputs_are_embedded(server: Server) -> None:
    names = ("embedding_slice_seconds_count", "generation_tokens_total", "num_requests_running")
    options = {"max_tokens": 1900, "stream": True, "extra_body": {"ignore_eos": True, "use_kv_cache": False}}

    def goes_on() -> bool:
        """Unless too little was seen, because this thread was held up."""
        with client_of(server).completions.create(model=MODEL, prompt="Once", **options) as stream:
            next(iter(stream))
            before = metrics(server, *names)
            thread, results = in_background(lambda: vectors_of(server, long_list(100)))
            after = before
            while thread.is_alive() and (now := metrics(server, *names))[2]:
                after = now
        thread.join()
        assert results[0].shape[0] == 100
        n_slices, n_tokens, _ = np.subtract(after, before)
        assert n_tokens >= 0.8 * n_slices  # with a step after each
        server.wait_until_idle()
        return bool(n_slices >= 5)  # it came in many

    wait_for(goes_on)


def test_a_short_request_does_not_wait_for_a_long_list(server: Server) -> None:
    began = metric(server, "embedding_inputs_total")
    with asking(server, ENDLESS) as connection:
        wait_for(lambda: metric(server, "embedding_inputs_total") > began)
        vectors_of(server, "a")
        assert not select.select([connection], (), (), 0)[0]  # the list has no answer yet
    wait_for(lambda: metric(server, "num_embedding_requests") == 0)


def test_a_client_that_goes_stops_its_list(server: Server) -> None:
    aborted = metric(server, 'embedding_requests_total{finished_reason="abort"}')
    before = metric(server, "embedding_inputs_total")
    with asking(server, ENDLESS):
        wait_for(lambda: metric(server, "embedding_inputs_total") > before)
    wait_for(lambda: metric(server, "num_embedding_requests") == 0)
    assert metric(server, 'embedding_requests_total{finished_reason="abort"}') == aborted + 1
    finish_the_slice(server)
    assert metric(server, "embedding_inputs_total") - before < 2048


def finish_the_slice(server: Server) -> None:
    """What was given up is counted: slices come one after the other."""
    vectors_of(server, "a")


def test_measures_and_no_rows(server: Server) -> None:
    server.wait_until_idle()
    finish_the_slice(server)
    cells, steps = server.stats()["cache"]["cells_used"], server.stats()["engine"]["steps"]
    names = ("embedding_inputs_total", "embedding_tokens_total", "embedding_request_latency_seconds_count")
    before = [metric(server, name) for name in names]
    answer = client_of(server).embeddings.create(model=MODEL, input=TEXTS)
    after = [metric(server, name) for name in names]
    assert np.subtract(after, before).tolist() == [len(TEXTS), answer.usage.prompt_tokens, 1]
    now = server.stats()
    assert (now["cache"]["cells_used"], now["engine"]["steps"]) == (cells, steps)


def test_when_too_many_wait() -> None:
    options = ["--n-ctx", "512", "--parallel", "1", "--max-queue", "0"]
    with running(*options, "--embeddings") as server:
        with asking(server, ENDLESS):
            wait_for(lambda: metric(server, "num_embedding_requests") == 1)
            status, answer, headers = server.request("POST", "/v1/embeddings", {"input": "a"})
            assert (status, answer["error"]["code"]) == (429, "queue_full")
            assert int(headers["retry-after"]) >= 1
            assert "the limit is parallel + max_queue=1" in answer["error"]["message"]
        wait_for(lambda: metric(server, "num_embedding_requests") == 0)
        assert len(vectors_of(server, "a")) == 1


def test_when_it_takes_too_long() -> None:
    with running("--n-ctx", "512", "--embeddings", "--request-timeout", "1") as server:
        status, answer, _ = server.request("POST", "/v1/embeddings", {"input": ENDLESS})
        assert (status, answer["error"]["code"]) == (504, "timeout")
        wait_for(lambda: server.status("POST", "/v1/embeddings", {"input": "a"}) == 200)


def test_a_shutdown_does_not_wait_for_a_list() -> None:
    with running("--n-ctx", "512", "--embeddings", "--drain-timeout", "0.2") as server:
        body = {"model": MODEL, "input": ENDLESS}
        thread, results = in_background(lambda: server.request("POST", "/v1/embeddings", body))
        wait_for(lambda: metric(server, "num_embedding_requests") == 1)
        assert server.stop(signal.SIGTERM) == 0
        thread.join()
        status, answer, headers = results[0]
        assert (status, answer["error"]["code"]) == (503, "shutting_down")
        assert int(headers["retry-after"]) >= 1
        assert "Traceback" not in server.log


def test_a_model_that_does_not_rank_says_so(server: Server) -> None:
    body = {"query": "a", "documents": ["b"]}
    status, answer, _ = server.request("POST", "/v1/rerank", body)
    assert (status, answer["error"]["param"]) == (400, "model")
    assert MODEL in answer["error"]["message"]
    assert "pooling type" in answer["error"]["message"]
