"""What Open WebUI sends, as its source has it. Its chats: test_sessions_of_agents.py."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from support.servers.server import MODEL, Server, running

pytestmark = pytest.mark.nightly

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the lamp?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--n-ctx", "2048") as server:
        yield server


def test_parts_marked_for_a_cache_and_an_effort_are_taken(server: Server) -> None:
    """Fields of other providers, which it sends to all."""
    part = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    chat = {"messages": [{"role": "user", "content": [part]}], "reasoning": {"effort": "low"}}
    assert server.post("/v1/chat/completions", {**chat, "max_tokens": 4})["choices"][0]["message"]["content"]


def test_a_connection_of_ollamas_kind(server: Server) -> None:
    for path, key in (("/api/version", "version"), ("/api/tags", "models"), ("/api/ps", "models")):
        assert key in server.request("GET", path)[1]
    options = {"temperature": 0, "num_predict": 8, "num_ctx": 2048, "repeat_penalty": 1.1, "num_batch": 512}
    options |= {"num_keep": 24, "use_mmap": True, "num_thread": 2, "new_topic_penalty": 0.5}
    chat = {"model": f"{MODEL}:latest", "messages": MESSAGES, "options": options, "keep_alive": "5m"}
    lines = [json.loads(line) for line in server.post("/api/chat", {**chat, "stream": True}).splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["eval_count"] == 8
    let_go = {"model": MODEL, "prompt": "", "keep_alive": 0, "stream": False}
    assert server.post("/api/generate", let_go)["done"]


def test_a_penalty_of_zero_is_taken_for_none(server: Server) -> None:
    """It gives OpenAI's frequency_penalty, whose neutral value is 0, as Ollama's repeat_penalty."""
    options = {"temperature": 0, "num_predict": 8}
    plain, zero = (
        server.post("/api/chat", {"messages": MESSAGES, "stream": False, "options": each})["message"]
        for each in (options, {**options, "repeat_penalty": 0})
    )
    assert zero["content"] == plain["content"]
