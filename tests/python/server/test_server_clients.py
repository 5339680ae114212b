"""Clients as people have them: the retries and errors of `openai`, and `langchain-openai` end to end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from support.patience import wait_for
from support.servers.server import MODEL, Server, key_file, running

pytestmark = pytest.mark.full

KEY = "a-key-0123456789abcdef"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--n-ctx", "65536", "--parallel", "1", "--max-queue", "0") as server:
        yield server


def make_client(server: Server, key: str = "unused", **options: Any) -> tuple[openai.OpenAI, list[int]]:
    """A client, and the statuses of the answers it gets."""
    statuses: list[int] = []

    def note(response: httpx.Response) -> None:
        statuses.append(response.status_code)

    http = httpx.Client(event_hooks={"response": [note]})
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, http_client=http, **options), statuses


def long_answer(client: openai.OpenAI, **options: Any) -> Any:
    """One that takes minutes."""
    options = {"max_tokens": 60_000, "extra_body": {"ignore_eos": True, "use_kv_cache": False}, **options}
    return client.completions.create(model=MODEL, prompt="Once upon a time", **options)


def wait_until(server: Server, n_running: int) -> None:
    wait_for(lambda: server.stats()["requests"]["running"] == n_running)


@pytest.fixture
def busy(server: Server) -> Iterator[openai.Stream[Any]]:
    """The one place is taken until the stream is closed."""
    server.wait_until_idle()
    client, _ = make_client(server, max_retries=0)
    with long_answer(client, stream=True) as stream:
        wait_until(server, 1)
        yield stream
    wait_until(server, 0)


def test_a_client_tries_again_when_the_queue_is_full(server: Server, busy: openai.Stream[Any]) -> None:
    client, statuses = make_client(server, max_retries=100)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(client.completions.create, model=MODEL, prompt="The", max_tokens=2)
        wait_for(lambda: statuses)
        busy.close()
        assert asking.result().usage.completion_tokens <= 2
    assert set(statuses[:-1]) == {429}
    assert statuses[-1] == 200


def test_a_full_queue_is_a_rate_limit_error(server: Server, busy: openai.Stream[Any]) -> None:
    client, statuses = make_client(server, max_retries=0)
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model=MODEL, prompt="The", max_tokens=2)
    assert statuses == [429]
    assert caught.value.code == "queue_full"
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert re.search(r"\d+ requests wait already, and the limit is max_queue=\d+", caught.value.message)


def test_a_wrong_key_is_an_authentication_error(tmp_path: Path) -> None:
    with running("--n-ctx", "512", "--api-key-file", str(key_file(tmp_path, f"one:{KEY}"))) as server:
        client, statuses = make_client(server, "not-" + KEY, max_retries=3)
        with pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert statuses == [401]
        assert KEY not in caught.value.message
        assert [model.id for model in make_client(server, KEY)[0].models.list()] == [MODEL]


def test_one_key_for_all_may_be_an_option() -> None:
    with running("--n-ctx", "512", "--api-key", "a-key-of-everybody") as server:
        with pytest.raises(openai.AuthenticationError):
            make_client(server, "none")[0].models.list()
        assert make_client(server, "a-key-of-everybody")[0].models.list().data


def test_who_has_no_key_sends_little(tmp_path: Path) -> None:
    with running("--n-ctx", "512", "--api-key-file", str(key_file(tmp_path, f"one:{KEY}"))) as server:
        large = {"prompt": "x" * 10_000, "max_tokens": 1}
        assert server.request("POST", "/v1/completions", large)[0] == 401
        assert server.request("POST", "/v1/completions", large, key="not-" + KEY)[0] == 401
        assert server.request("POST", "/v1/completions", {"prompt": "x"})[0] == 401
        assert server.request("POST", "/v1/completions", large, key=KEY)[0] == 400  # more than the context


def test_grammars_and_regular_expressions_are_followed(server: Server) -> None:
    for change in ({"grammar": 'root ::= "ab"'}, {"regex": "ab"}):
        answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 4, **change})
        assert answer["choices"][0]["text"] == "ab"
        assert answer["choices"][0]["finish_reason"] == "stop"
