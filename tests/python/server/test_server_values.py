"""Values at the edge of what fields take, and what an error says of the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.servers.server import Server, running

pytestmark = pytest.mark.full

PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/api/generate": {"prompt": "x", "stream": False},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--n-ctx", "512") as server:
        yield server


@pytest.mark.parametrize("path", PATHS)
def test_top_k_of_minus_1_is_off(server: Server, path: str) -> None:
    def ask(top_k: int) -> int:
        more = (
            {"options": {"top_k": top_k, "num_predict": 1}} if path.startswith("/api") else {"top_k": top_k}
        )
        return server.status("POST", path, {**PATHS[path], **more})

    assert [ask(top_k) for top_k in (-1, 0, 40)] == [200, 200, 200]
    assert ask(-2) == 400


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/api/generate"])
@pytest.mark.parametrize(
    ("stop", "says"),
    [
        (["x"] * 17, "at most 16"),
        (5, "a text or a list"),
        ([5], "stop.0: Input should be a valid string"),
        ("", "at least 1"),
    ],
)
def test_an_error_of_a_union_is_about_what_was_given(server: Server, path: str, stop: Any, says: str) -> None:
    more = {"options": {"stop": stop}} if path.startswith("/api") else {"stop": stop}
    status, answer, _ = server.request("POST", path, {**PATHS[path], **more})
    assert status == 400
    said = answer["error"] if path.startswith("/api") else answer["error"]["message"]
    assert "stop" in said
    assert says in said


USER = {"role": "user", "content": "x"}


def content(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/completions", {"prompt": ["a", 5]}, "prompt.1: Input should be a valid string"),
        ("/v1/completions", {"prompt": [5, -1]}, "prompt.1: Input should be greater than or equal to 0"),
        ("/v1/completions", {"prompt": ["a"] * 65}, "prompt: List should have at most 64 items"),
        ("/v1/completions", {"prompt": [[5], "a"]}, "prompt.1: Input should be a valid list"),
        ("/v1/completions", {"prompt": {}}, "prompt: give a text, a list of texts, a list of token ids"),
        ("/v1/warm", {"prompt": [5, {}]}, "prompt.1: Input should be a valid integer"),
        ("/v1/chat/completions", content({"type": "text"}), "content.0.text.text: Field required"),
        ("/v1/chat/completions", {"messages": [{**USER, "content": 5}]}, "content: give a text or a list"),
        (
            "/v1/chat/completions",
            {"messages": [USER], "tool_choice": {"type": "function"}},
            "tool_choice.function: Field required",
        ),
        (
            "/v1/chat/completions",
            {"messages": [USER], "tool_choice": 5},
            "tool_choice: give none, auto, required, or a function",
        ),
        (
            "/v1/chat/completions",
            {"messages": [USER], "prediction": {"type": "content", "content": [{"type": "text"}]}},
            "prediction.content.0.text: Field required",
        ),
        ("/v1/messages", {**content(USER), "system": 5}, "system: give a text or a list"),
        ("/v1/responses", {"input": 5}, "input: give a text or a list"),
        (
            "/v1/responses",
            {"input": [{"type": "item_reference", "id": "a"}]},
            "give a message, function_call",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input.0.content.0.text: Field required",
        ),
        ("/v1/responses", {"input": "a", "tool_choice": {"type": "function"}}, "tool_choice.name: Field"),
        ("/api/chat", {"messages": [USER], "format": 5}, "format: give json or a JSON Schema"),
        ("/api/chat", {"messages": [USER], "think": 5}, "think: give true, false, low"),
        ("/api/chat", {"messages": [USER], "keep_alive": [1]}, "keep_alive: give seconds, or a text"),
        ("/api/embed", {"input": 5}, "input: give a text or a list"),
        ("/v1/chat/completions", None, "the body is empty: send a JSON object"),
        ("/v1/chat/completions", [5], "the body is not a JSON object"),
        ("/v1/chat/completions", {"messages": ["x"]}, "messages.0: Input should be an object"),
        (
            "/v1/chat/completions",
            content({"type": "txt"}),
            "content.0: 'txt' is none of 'text', 'input_text'",
        ),
        ("/v1/chat/completion", {}, "no POST /v1/chat/completion (did you mean /v1/chat/completions?)"),
        ("/v1/models", {}, "POST does not go with /v1/models: use GET"),
    ],
)
def test_an_error_names_the_problem_of_the_kind_that_was_given(
    server: Server, path: str, body: Any, says: str
) -> None:
    status, answer, _ = server.request("POST", path, body)
    assert 400 <= status <= 405
    assert says in (answer["error"] if path.startswith("/api") else answer["error"]["message"])
