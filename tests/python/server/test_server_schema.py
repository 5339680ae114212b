"""Requests made from the OpenAPI description by schemathesis, good ones and bad ones, never meet a 500."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from support.patience import PATIENCE
from support.servers.server import MODEL, Server, running

schemathesis = pytest.importorskip("schemathesis", reason="needs the Python package schemathesis")

pytestmark = pytest.mark.full

_GOOD, _BAD = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
_EXAMPLES = 25
_PLAIN = (
    "GET /v1/models",
    "GET /v1/models/{model}",
    "GET /v1/stats",
    "GET /health",
    "GET /ready",
    "GET /metrics",
    "GET /api/ps",
    "GET /api/tags",
    "GET /api/version",
    "GET /props",
    "GET /lora-adapters",
)
_EVALUATING = (
    "POST /v1/chat/completions",
    "POST /v1/chat/completions/input_tokens",
    "POST /v1/completions",
    "POST /v1/context",
    "POST /v1/warm",
    "POST /v1/embeddings",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/responses",
    "POST /v1/responses/input_tokens",
    "POST /tokenize",
    "POST /detokenize",
    "POST /apply-template",
    "POST /api/chat",
    "POST /api/generate",
    "POST /api/embed",
    "POST /api/embeddings",
    "POST /api/show",
    "POST /completion",
)
_OTHERS = (
    "POST /infill",  # the model has no tokens for it
    "POST /v1/rerank",  # it does not rank
    "GET /v1/context",
    "GET /v1/context/{session_id}",
    "PATCH /v1/context/{session_id}",
    "DELETE /v1/context/{session_id}",
    "DELETE /v1/responses/{response_id}",
    "GET /v1/responses/{response_id}",
    "GET /v1/cache/messages",
    "GET /v1/cache/messages/{message_id}",
    "DELETE /v1/cache/messages/{message_id}",
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A small context, so that answers without a max_tokens end soon."""
    with running("--n-ctx", "256", "--parallel", "4", "--max-body-mb", "0.1", "--embeddings") as server:
        yield server


@pytest.fixture(scope="module")
def operations(server: Server) -> dict[str, Any]:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    return {result.ok().label: result.ok() for result in schema.get_all_operations()}


def test_every_operation_is_tested(operations: dict[str, Any]) -> None:
    assert set(operations) == {*_PLAIN, *_EVALUATING, *_OTHERS}


@pytest.mark.parametrize("label", [*_EVALUATING, *_OTHERS, *_PLAIN])
@pytest.mark.nightly
def test_good_requests(server: Server, operations: dict[str, Any], label: str) -> None:
    statuses = _run(operations[label], _GOOD)
    _is_well(server)
    if label in _EVALUATING:  # not all of them were refused
        assert statuses[200] + statuses[201] > 0, statuses


@pytest.mark.parametrize("label", [*_EVALUATING, *_OTHERS])
@pytest.mark.nightly
def test_bad_requests(server: Server, operations: dict[str, Any], label: str) -> None:
    statuses = _run(operations[label], _BAD)
    _is_well(server)
    assert sum(n for status, n in statuses.items() if status >= 400) > 0, statuses


def _run(operation: Any, mode: Any) -> Counter[int]:
    """How often the answers to made-up requests had each status."""
    statuses: Counter[int] = Counter()

    @hypothesis.settings(
        max_examples=_EXAMPLES,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if mode is _GOOD and isinstance(case.body, dict):
            _make_sense(case.body, plain=statuses.total() % 3 == 0)
        response = case.call(timeout=PATIENCE)
        _check(response, case)
        statuses[response.status_code] += 1

    check()
    return statuses


def _make_sense(body: dict[str, Any], plain: bool) -> None:
    """What no schema says: names of what is there, and fields that go with others only. A plain one asks
    something, since made-up messages mostly answer calls that were not made, or have images in odd places.
    """
    body["model"] = MODEL
    if plain and "messages" in body:
        body["messages"] = [{"role": "user", "content": "hello"}]
        for name in (
            "tools",
            "tool_choice",
            "chat_template_kwargs",
            "response_format",
            "continue_final_message",
        ):
            body.pop(name, None)
    alone = ["session_id", "append", "session_version"]
    if not body.get("stream"):
        alone += ["stream_options", "return_progress"]
    for name in alone:
        body.pop(name, None)


def _is_well(server: Server) -> None:
    server.wait_until_idle()
    assert server.status("GET", "/health") == 200
    assert "Traceback" not in server.log


def _check(response: Any, case: Any) -> None:
    what = f"{case.method} {case.path} {case.body!r}"[:2000]
    # 503 and 504 are promised under load; here one client asks at a time
    assert response.status_code < 500, f"{response.status_code} {response.text[:500]}\n{what}"
    if response.status_code >= 400:
        error = json.loads(response.content)["error"]
        assert error if case.path.startswith("/api/") else error["message"], what
