"""Chats longer than the context over HTTP: by the server's option, and by request."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from mixedkv.bundled.corpus import make_recall
from mixedkv_server.settings import ServerSettings
from support.servers.server import MODEL, Server, running

pytestmark = pytest.mark.full

CHAT = "/v1/chat/completions"
N_CTX = 512
Message = dict[str, str]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--n-ctx", str(N_CTX), "--parallel", "2", "--idle-prefixes", "2") as server:
        yield server


def note(i: int) -> Message:
    return {"role": "user", "content": " ".join(make_recall(66_000 + i, 4).journal)}


def notes(n: int) -> list[Message]:
    said = {"role": "assistant", "content": "I have noted that."}
    return [message for i in range(n) for message in (note(i), said)]


def ask(server: Server, messages: list[Message], **body: Any) -> Any:
    fields = {"messages": messages, "max_tokens": 16, "temperature": 0, "overflow": "slide", **body}
    return server.post(CHAT, fields)


def test_a_chat_goes_on_and_evaluates_what_is_new(server: Server) -> None:
    messages, usages = notes(9), []
    for i in range(12):
        messages.append(note(50 + i))
        answer = ask(server, messages)
        messages.append(answer["choices"][0]["message"])
        messages[-1] = {name: messages[-1][name] for name in ("role", "content")}
        usages.append(answer["usage"])
    assert usages[-1]["prompt_tokens"] > 1.5 * N_CTX
    assert "dropped_tokens" not in usages[0]
    dropped = [usage.get("dropped_tokens", 0) for usage in usages]
    assert dropped == sorted(dropped)
    assert usages[-1]["prompt_tokens"] - dropped[-1] < N_CTX
    for usage, n in zip(usages[1:], dropped[1:], strict=True):
        details = usage["prompt_tokens_details"]
        found = details["cached_tokens"] + details.get("approximate_cached_tokens", 0)
        assert usage["prompt_tokens"] - n - found < 80
        if n:
            assert details["cached_tokens"] == 0
            assert not details["cached_exact"]
    counted = re.search(r"^mixedkv_dropped_tokens_total (.*)$", server.metrics(), re.M)
    assert counted
    assert float(counted[1]) >= sum(dropped)
    assert server.stats()["recent"][0]["dropped_tokens"] == dropped[-1]


def test_an_answer_goes_on_as_a_stream_too(server: Server) -> None:
    fields = {"prompt": note(90)["content"], "max_tokens": N_CTX + 50, "ignore_eos": True}
    usage = server.post("/v1/completions", fields)["usage"]
    assert usage["total_tokens"] == N_CTX
    more = {"overflow": "slide", "stream_options": {"include_usage": True}}
    usage = server.events("/v1/completions", {**fields, **more})[-1]["usage"]
    assert usage["completion_tokens"] == N_CTX + 50
    assert usage["dropped_tokens"] > 0


def test_a_prompt_of_any_length_is_taken(server: Server) -> None:
    """Where refused it is not even read."""
    long = {"prompt": "The lamp lies in the market. " * 2000, "max_tokens": 2}
    status, answer, _ = server.request("POST", "/v1/completions", long)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    usage = server.post("/v1/completions", {**long, "overflow": "slide"})["usage"]
    assert usage["prompt_tokens"] > 10_000
    assert usage["prompt_tokens"] - usage["dropped_tokens"] < N_CTX


def test_truncation_of_responses_is_the_same(server: Server) -> None:
    body = {"input": [*notes(12), note(91)], "max_output_tokens": 4}
    status, answer, _ = server.request("POST", "/v1/responses", body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    answer = server.post("/v1/responses", {**body, "truncation": "auto"})
    assert answer["truncation"] == "auto"
    assert answer["usage"]["input_tokens"] > N_CTX


def test_a_session_that_grows_goes_on(server: Server) -> None:
    server.post(
        "/v1/context", {"model": MODEL, "session_id": "endless", "messages": notes(1), "mode": "append"}
    )
    for i in range(14):
        answer = ask(server, [note(70 + i)], session_id="endless")
    assert answer["usage"]["prompt_tokens"] > N_CTX
    assert answer["usage"]["dropped_tokens"] > 0
    details = answer["usage"]["prompt_tokens_details"]
    assert details["approximate_cached_tokens"] > 200


def test_the_option_is_the_default_of_requests() -> None:
    with pytest.raises(ValidationError, match="overflow"):
        ServerSettings(overflow="drop")  # type: ignore[arg-type]
    with running("--n-ctx", str(N_CTX), "--overflow", "slide") as server:
        body = {"messages": [*notes(12), note(91)], "max_tokens": 4}
        assert server.post(CHAT, body)["usage"]["dropped_tokens"] > 0
        assert server.status("POST", CHAT, {**body, "overflow": "refuse"}) == 400
