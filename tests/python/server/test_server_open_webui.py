"""What Open WebUI sends, as its source has it: a connection of OpenAI's kind, and one of Ollama's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.patience import PATIENCE
from support.server_support import MODEL, Server, running

pytestmark = pytest.mark.nightly

JSON = {"Content-Type": "application/json"}
USER = {
    "X-OpenWebUI-User-Name": "Ada%20L",
    "X-OpenWebUI-User-Id": "1",
    "X-OpenWebUI-User-Email": "ada@example.org",
    "X-OpenWebUI-User-Role": "admin",
}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the lamp?"}]
TITLE = "### Task:\nGenerate a concise title.\n### Output:\nJSON\n<chat_history>USER: Hello</chat_history>"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--n-ctx", "2048", "--embeddings", "--embedding-n-ctx", "128") as server:
        yield server


def post(server: Server, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    """Its bodies are JSON that it has encoded itself."""
    content = json.dumps(body)
    answer = httpx.post(server.url + path, content=content, headers={**JSON, **headers}, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer


def test_a_connection_of_openais_kind(server: Server) -> None:
    listed = httpx.get(f"{server.url}/v1/models", headers=USER, timeout=PATIENCE).json()
    assert [model["id"] for model in listed["data"]] == [MODEL]
    chat = {
        "stream": True,
        "model": MODEL,
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 8,
        "stream_options": {"include_usage": True},
        "logit_bias": {},
        "stop": [],
    }
    answer = post(server, "/v1/chat/completions", chat, **USER)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]) != ""
    assert chunks[-1]["usage"]["completion_tokens"] == 8


def test_parts_marked_for_a_cache_and_an_effort_are_taken(server: Server) -> None:
    """Fields of other providers, which it sends to all."""
    part = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    chat = {
        "model": MODEL,
        "messages": [{"role": "user", "content": [part]}],
        "max_tokens": 4,
        "stream": False,
        "reasoning": {"effort": "low"},
    }
    assert post(server, "/v1/chat/completions", chat).json()["choices"][0]["message"]["content"]


def test_titles_and_tags_in_the_background(server: Server) -> None:
    """They are not streamed, and long."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": TITLE}],
        "stream": False,
        "max_completion_tokens": 1000,
    }
    answer = post(server, "/v1/chat/completions", body).json()
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")


def test_a_connection_of_ollamas_kind(server: Server) -> None:
    for path, key in (("/api/version", "version"), ("/api/tags", "models"), ("/api/ps", "models")):
        answer = httpx.get(server.url + path, headers={**JSON, **USER}, timeout=PATIENCE)
        assert answer.status_code == 200
        assert key in answer.json()
    options = {"temperature": 0, "num_predict": 8, "num_ctx": 2048, "repeat_penalty": 1.1, "num_batch": 512}
    chat = {
        "model": f"{MODEL}:latest",
        "messages": MESSAGES,
        "stream": True,
        "options": {**options, "num_keep": 24, "use_mmap": True, "num_thread": 2, "new_topic_penalty": 0.5},
        "keep_alive": "5m",
    }
    lines = [json.loads(line) for line in post(server, "/api/chat", chat, **USER).text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) != ""
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["eval_count"] == 8


def test_a_penalty_of_zero_is_taken_for_none(server: Server) -> None:
    """It gives OpenAI's frequency_penalty, whose neutral value is 0, as Ollama's repeat_penalty."""
    chat = {"model": MODEL, "messages": MESSAGES, "stream": False}
    options = {"temperature": 0, "num_predict": 8}
    plain = post(server, "/api/chat", {**chat, "options": options}).json()
    zero = post(server, "/api/chat", {**chat, "options": {**options, "repeat_penalty": 0}}).json()
    assert zero["message"]["content"] == plain["message"]["content"]


def test_vectors_of_documents_and_a_model_that_is_let_go(server: Server) -> None:
    body = {"model": MODEL, "input": ["The lamp.", "The mill."], "truncate": True}
    assert len(post(server, "/api/embed", body).json()["embeddings"]) == 2
    assert len(post(server, "/v1/embeddings", {"model": MODEL, "input": ["The lamp."]}).json()["data"]) == 1
    answer = post(server, "/api/generate", {"model": MODEL, "prompt": "", "keep_alive": 0, "stream": False})
    assert answer.json()["done"]
