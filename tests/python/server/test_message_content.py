"""What a message says reaches the model, in every API, or is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.models.not_finite import write_model
from support.servers.server import Server, running

pytestmark = pytest.mark.full

FACT = "The code of the mill is 4817."
DOCUMENT = {"type": "document", "title": "Codes", "source": {"type": "text", "data": FACT}}
PARTS = {
    "type": "document",
    "context": 'of "mills"',
    "source": {"type": "content", "content": [{"type": "text", "text": FACT}]},
    "citations": {"enabled": True},
}
RESULT = {
    "type": "search_result",
    "source": "https://x.example/a",
    "title": "Codes",
    "content": [{"type": "text", "text": FACT}],
}
QUESTION = {"type": "text", "text": "What is the code?"}
CALL = [
    {"role": "user", "content": "Look it up."},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "find", "input": {}}]},
]
TOOLS = [{"name": "find", "description": "Finds it.", "input_schema": {"type": "object", "properties": {}}}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--n-ctx", "2048", "--chat-format", "chatml") as started:
        yield started


def count(server: Server, messages: list[Any], **fields: Any) -> int:
    answer = server.post("/v1/messages/count_tokens", {"messages": messages, **fields})
    assert not answer.get("warnings") or "citations" in str(answer["warnings"])
    return int(answer["input_tokens"])


def n_tokens(server: Server, text: str) -> int:
    return len(server.post("/tokenize", {"content": text})["tokens"])


@pytest.mark.parametrize("block", [DOCUMENT, PARTS, RESULT])
def test_documents_reach_the_model(server: Server, block: dict[str, Any]) -> None:
    least = n_tokens(server, FACT)
    with_it = [{"role": "user", "content": [block, QUESTION]}]
    without = [{"role": "user", "content": [QUESTION]}]
    assert count(server, with_it) - count(server, without) >= least
    results = [
        [
            *CALL,
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": content}]},
        ]
        for content in ([block], [])
    ]
    with_it_of_tool, without_of_tool = (count(server, each, tools=TOOLS) for each in results)
    assert with_it_of_tool - without_of_tool >= least
    answer = server.post("/v1/messages", {"messages": with_it, "max_tokens": 1})
    used = answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]
    assert used == count(server, with_it)


def test_a_refusal_stays_in_the_chat(server: Server) -> None:
    def prompt(answer: dict[str, Any]) -> str:
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", **answer},
            {"role": "user", "content": "b"},
        ]
        return str(server.post("/apply-template", {"messages": messages})["prompt"])

    assert "I will not." in prompt({"refusal": "I will not."})
    assert "I will not." in prompt({"content": [{"type": "refusal", "refusal": "I will not."}]})
    items = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not do that."}]},
        {"role": "user", "content": "b"},
    ]
    usage = [
        server.post("/v1/responses", {"input": each, "max_output_tokens": 1})["usage"]["input_tokens"]
        for each in (items, [items[0], items[2]])
    ]
    assert usage[0] > usage[1] + 3


def test_tokens_are_counted_as_they_are_used(server: Server) -> None:
    messages = [{"role": "user", "content": "Where is Oslo?"}]
    counted = {}
    for choice in ("auto", "any", "none"):
        body = {"messages": messages, "tools": TOOLS, "tool_choice": {"type": choice}}
        usage = server.post("/v1/messages", {**body, "max_tokens": 1})["usage"]
        counted[choice] = count(server, messages, tools=TOOLS, tool_choice={"type": choice})
        assert counted[choice] == usage["input_tokens"] + usage["cache_read_input_tokens"], choice
    details = server.post("/v1/responses", {"input": "Where is it?", "max_output_tokens": 1})["usage"]
    found = details["input_tokens_details"]
    assert found["cache_write_tokens"] + found["cached_tokens"] == details["input_tokens"]


def test_an_answer_of_no_numbers_is_an_error(tmp_path: Path) -> None:
    with running("-m", str(write_model(tmp_path / "m.gguf")), "--n-ctx", "512", "--embeddings") as server:
        bodies = {
            "/v1/completions": {"prompt": "Hi", "logprobs": 2},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
            "/completion": {"prompt": "Hi", "n_predict": 3, "n_probs": 2},
            "/api/generate": {"prompt": "Hi", "stream": False},
            "/v1/embeddings": {"input": "Hi"},
        }
        for path, body in bodies.items():
            status, answer, _ = server.request("POST", path, body)
            assert status == 500, (path, answer)
            assert "not numbers (NaN or infinite)" in str(answer["error"]), path
        status, answer, _ = server.request("GET", "/health")
        assert status == 503
        assert answer["error"]["code"] == "not_finite"
        assert 'request_failure_total{reason="not_finite"} 4.0' in server.metrics()
        assert "an answer ends" in server.log
