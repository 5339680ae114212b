"""Values at the edge of what fields take, and what an error says of the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.server_support import Server, running

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
    [(["x"] * 17, "at most 16"), (5, "string"), ([5], "string"), ("", "at least 1")],
)
def test_an_error_of_a_union_is_about_what_was_given(server: Server, path: str, stop: Any, says: str) -> None:
    more = {"options": {"stop": stop}} if path.startswith("/api") else {"stop": stop}
    status, answer, _ = server.request("POST", path, {**PATHS[path], **more})
    assert status == 400
    said = answer["error"] if path.startswith("/api") else answer["error"]["message"]
    assert "stop" in said
    assert says in said
