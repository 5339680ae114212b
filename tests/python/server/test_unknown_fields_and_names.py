"""The server takes what clients of other servers send: unknown fields, other names, keys and paths."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from support.patience import PATIENCE, wait_for
from support.servers.server import MODEL, Server, key_file, running

pytestmark = pytest.mark.full

KEY = "a-key-0123456789abcdef"
USER = {"role": "user", "content": "Hello"}
CHAT = {"messages": [USER], "max_tokens": 2, "temperature": 0}
SITE = "https://chat.example.org"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = ["--n-ctx", "1024", "--allow", SITE, "--allow", "box.example.org"]
    with running(*options) as server:
        yield server


@pytest.fixture(scope="module")
def strict() -> Iterator[Server]:
    with running("--n-ctx", "1024", "--strict") as server:
        yield server


def ask(server: Server, path: str, headers: dict[str, str], method: str = "GET") -> tuple[int, Any]:
    request = urllib.request.Request(server.url + path, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return response.status, response.headers
    except urllib.error.HTTPError as error:
        return error.code, error.headers


ODD = {
    **CHAT,
    "messages": [
        {**USER, "mood": "good"},
        {"role": "system", "content": [{"type": "text", "text": "a", "x": 1}]},
    ],
    "cache_prompt": True,
    "id_slot": -1,
}


@pytest.mark.parametrize("filler", ["", "x" * 100_000])
def test_unknown_fields_are_ignored_and_said_once(server: Server, filler: str) -> None:
    body = {**ODD, "note": filler}
    plain = server.post(
        "/v1/chat/completions", {**CHAT, "messages": [USER, {"role": "system", "content": "a"}]}
    )
    for _ in range(2):
        answer = server.post("/v1/chat/completions", body)
        assert answer["choices"] == plain["choices"]
        assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    for name in ("cache_prompt", "id_slot", "messages[].mood", "messages[].content[].x"):
        server.wait_for_log(name)


def test_odd_names_are_not_repeated_in_the_log(server: Server) -> None:
    server.post("/v1/chat/completions", {**CHAT, "a b\nERROR: c": 1})
    wait_for(lambda: "odd name" in server.log)
    assert "a b" not in server.log


def test_strict_refuses(strict: Server) -> None:
    for body, param in (
        (ODD, "mood"),
        ({**CHAT, "id_slot": 1}, "id_slot"),
        ({**CHAT, "model": "a"}, "model"),
    ):
        status, answer, _ = strict.request("POST", "/v1/chat/completions", body)
        assert (status, answer["error"]["param"].rpartition(".")[2]) == (
            404 if param == "model" else 400,
            param,
        )
    assert strict.post("/v1/chat/completions", CHAT)["choices"]


def test_the_description_says_what_is_taken(server: Server, strict: Server) -> None:
    for each, closed in ((server, False), (strict, True)):
        schema = each.request("GET", "/openapi.json")[1]["components"]["schemas"]["ChatRequest"]
        assert ("additionalProperties" in schema) == closed


def test_one_model_has_any_name(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    for _ in range(2):
        answer = client.chat.completions.create(model="gpt-4o", messages=[USER], max_tokens=1)
        assert answer.model == MODEL
    server.wait_for_log("another model than")
    assert "gpt-4o" not in server.log
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_clients_without_v1(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url, api_key="none")
    assert [each.id for each in client.models.list()] == [MODEL]
    assert client.chat.completions.create(model=MODEL, messages=[USER], max_tokens=1).choices
    assert client.completions.create(model=MODEL, prompt="a", max_tokens=1).choices
    response = client.responses.create(model=MODEL, input="a", max_output_tokens=1, store=True)
    assert client.responses.retrieve(response.id).id == response.id
    status, answer, _ = server.request("POST", "/messages", {"messages": []})
    assert (status, answer["type"]) == (400, "error")
    assert server.status("GET", "/chatter") == 404


def test_a_response_is_retrieved_as_it_was(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    made = client.responses.create(
        model=MODEL, input="Where?", max_output_tokens=6, temperature=0, store=True
    )
    found = client.responses.retrieve(made.id)
    assert found.output_text == made.output_text != ""
    assert (found.model, found.status, found.usage) == (MODEL, "completed", None)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_pages_of_allowed_sites(server: Server) -> None:
    expected = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    status, headers = ask(server, "/v1/chat/completions", {"Origin": SITE, **expected}, "OPTIONS")
    assert (status, headers["access-control-allow-origin"]) == (200, SITE)
    assert "authorization" in headers["access-control-allow-headers"]
    status, headers = ask(server, "/v1/models", {"Origin": SITE})
    assert (status, headers["access-control-allow-origin"]) == (200, SITE)
    status, headers = ask(server, "/v1/models", {"Origin": "https://evil.example.org"})
    assert (status, headers["access-control-allow-origin"]) == (403, None)


@pytest.mark.parametrize(
    ("allowed", "allows"),
    [((), ["*", "*"]), (("--allow", SITE), [SITE, None]), (("--allow", "*"), ["*", "*"])],
)
def test_pages_with_a_key(allowed: tuple[str, ...], allows: list[str | None]) -> None:
    """Every site's, unless some are named: a page has no key but the one that its user gives it."""
    expected = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with running("--n-ctx", "1024", "--api-key", KEY, *allowed) as server:
        for site, allowed_site in zip((SITE, "https://other.example.org"), allows, strict=True):
            status, headers = ask(server, "/v1/models", {"Origin": site, **expected}, "OPTIONS")
            assert status == (200 if allowed_site else 400)
            assert headers["access-control-allow-origin"] == allowed_site
            assert headers["access-control-allow-credentials"] is None
            for key, status in ((KEY, 200), ("another", 401)):
                given = {"Origin": site, "Authorization": f"Bearer {key}"}
                found, headers = ask(server, "/v1/models", given)
                assert (found, headers["access-control-allow-origin"]) == (status, allowed_site)


def test_names_of_the_server(server: Server) -> None:
    assert ask(server, "/v1/models", {"Host": "box.example.org:8000"})[0] == 200
    assert ask(server, "/v1/models", {"Host": "other.example.org"})[0] == 403


def test_a_key_may_come_as_x_api_key(tmp_path: Any) -> None:
    keys = str(key_file(tmp_path, f"anna:{KEY}"))
    with running("--n-ctx", "1024", "--api-key-file", keys) as server:
        client = anthropic.Anthropic(base_url=server.url, api_key=KEY)
        assert client.messages.create(model="claude", max_tokens=1, messages=[USER]).content  # type: ignore[typeddict-item, list-item]
        large = [{"role": "user", "content": "x" * 5000}]  # more than is read without a key
        with pytest.raises(anthropic.BadRequestError, match="tokens"):
            client.messages.create(model="claude", max_tokens=1, messages=large)  # type: ignore[arg-type]
        wrong = anthropic.Anthropic(base_url=server.url, api_key="no-" + KEY, max_retries=0)
        with pytest.raises(anthropic.AuthenticationError):
            wrong.messages.create(model="claude", max_tokens=1, messages=[USER])  # type: ignore[list-item]


def test_an_origin_is_checked() -> None:
    with pytest.raises(RuntimeError, match="with its scheme"):
        running("--allow", "example.org/chat").__enter__()


NOMINAL: dict[str, Any] = {
    "user": "anna",
    "service_tier": "flex",
    "metadata": {"a": "b"},
    "verbosity": "low",
    "store": True,
    "prompt_cache_key": "k",
}


@pytest.mark.parametrize("filler", ["", "x" * 100_000])
def test_a_response_says_which_fields_did_nothing(server: Server, filler: str) -> None:
    body = {**CHAT, **NOMINAL, "id_slot": 1, "note": filler}
    _, answer, headers = server.request("POST", "/v1/chat/completions", body)
    names = sorted([*NOMINAL, "id_slot", "note"])
    assert headers["x-ignored-fields"] == ", ".join(names)
    assert [line.partition(":")[0] for line in answer["warnings"]] == names
    status, stream, headers = server.request("POST", "/v1/chat/completions", {**body, "stream": True})
    assert (status, headers["x-ignored-fields"]) == (200, ", ".join(names))
    assert "[DONE]" in str(stream)
    # nothing is said where nothing was lost
    idle = {"store": False, "metadata": {}, "service_tier": "auto", "user": None}
    asked = {**CHAT, **idle, "use_kv_cache": True}
    _, answer, headers = server.request("POST", "/v1/chat/completions", asked)
    assert "x-ignored-fields" not in headers
    assert "warnings" not in answer


def test_a_misspelt_field_is_told_what_was_meant(server: Server) -> None:
    _, answer, _ = server.request("POST", "/v1/chat/completions", {**CHAT, "temprature": 0.2})
    assert answer["warnings"] == ["temprature: it has no effect here (did you mean temperature?)"]


def test_no_name_of_a_client_gets_into_a_header_as_it_is(server: Server) -> None:
    _, answer, headers = server.request("POST", "/v1/chat/completions", {**CHAT, "a\r\nSet-Cookie: b": 1})
    assert headers["x-ignored-fields"] == "(an odd name)"
    assert answer["warnings"] == ["(an odd name): it has no effect here"]


def test_other_apis_say_it_too(server: Server) -> None:
    part = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [part]}
    body = {"model": MODEL, "messages": [message], "max_tokens": 2, "metadata": {"user_id": "u"}}
    _, answer, headers = server.request("POST", "/v1/messages", body)
    assert headers["x-ignored-fields"] == "messages[].content[].cache_control, metadata"
    assert anthropic.types.Message.model_validate(answer)
    body = {"input": "Hello", "max_output_tokens": 16, "text": {"verbosity": "low"}, "user": "u"}
    _, answer, headers = server.request("POST", "/v1/responses", body)
    assert headers["x-ignored-fields"] == "text.verbosity, user"
