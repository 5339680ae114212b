"""The server as OpenAI's Python client, unchanged, sees it."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mixedkv import __version__
from mixedkv.bundled.corpus import make_recall
from mixedkv_server.http_server import listen
from mixedkv_server.settings import ServerSettings
from support.servers.server import MODEL, Server, running

pytestmark = pytest.mark.core

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "code": {"type": "integer", "enum": [1, 22]}},
    "required": ["name", "code"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--n-ctx", "4096", "--parallel", "4", "--max-body-mb", "1") as server:
        yield server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def ask(client: openai.OpenAI, number: int, **options: object) -> openai.types.chat.ChatCompletion:
    messages = make_recall(number, 20).messages
    return client.chat.completions.create(model=MODEL, messages=messages, **{"temperature": 0, **options})


def test_a_chat_is_answered_and_counted(client: openai.OpenAI) -> None:
    answer = ask(client, 1)
    assert answer.choices[0].message.content == make_recall(1, 20).fact.answer
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_streamed_text_is_the_same_and_usage_comes_last(client: openai.OpenAI) -> None:
    whole = ask(client, 2)
    chunks = list(ask(client, 2, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_second_turn_evaluates_the_new_message_only(client: openai.OpenAI) -> None:
    messages = list(make_recall(3, 20).messages)
    first = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    messages.append({"role": "assistant", "content": first.choices[0].message.content})
    messages.append({"role": "user", "content": "And now?"})
    second = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    cached = second.usage.prompt_tokens_details
    # what was sampled last was never evaluated
    assert cached.cached_tokens >= first.usage.total_tokens - 1
    assert cached.cached_exact


def test_json_schema(client: openai.OpenAI) -> None:
    expected = {"type": "json_schema", "json_schema": {"name": "fact", "schema": SCHEMA, "strict": True}}
    answer = ask(client, 4, response_format=expected, max_tokens=100)
    value = json.loads(answer.choices[0].message.content)
    assert value.keys() == {"name", "code"}
    assert value["code"] in (1, 22)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^(foo|food|bar)$"},
        {"type": "string", "pattern": "^(a[b-d]*x)?[0-9]{2,3}$"},
        {"type": "string", "pattern": r'^"\\\n[\u00e9\u4e00]\U0001f600-\d$'},
        {"enum": ['a"b\\c', "\t\u00e9\U0001f600"]},
        {"type": "object", "properties": {'"\\': {"const": None}}, "required": ['"\\']},
        {"type": "string", "pattern": "^(a?){1000}$"},
    ],
)
def test_what_a_schema_says_is_what_comes(client: openai.OpenAI, schema: dict[str, Any]) -> None:
    expected = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    choice = ask(client, 4, response_format=expected, max_tokens=200, temperature=1, seed=1).choices[0]
    assert choice.finish_reason == "stop"
    value = json.loads(choice.message.content)
    if "pattern" in schema:
        assert re.fullmatch(schema["pattern"][1:-1], value)
    assert value in schema.get("enum", [value])
    assert value == {'"\\': None} or schema.get("type") != "object"


def test_each_choice_follows_the_schema(client: openai.OpenAI) -> None:
    items = {"type": "integer", "minimum": 1, "maximum": 6}
    schema = {"type": "array", "items": items, "minItems": 5, "maxItems": 5}
    expected = {"type": "json_schema", "json_schema": {"name": "dice", "schema": schema}}
    answer = ask(client, 4, response_format=expected, n=3, temperature=5, seed=1, max_tokens=200)
    values = [json.loads(choice.message.content) for choice in answer.choices]
    assert all(len(value) == 5 and all(1 <= n <= 6 for n in value) for value in values)
    assert len({str(value) for value in values}) > 1


def test_choices_share_their_prompt(client: openai.OpenAI) -> None:
    answer = ask(client, 5, n=3, temperature=1.5, seed=7, max_tokens=12)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    again = ask(client, 5, n=3, temperature=1.5, seed=7, max_tokens=12)
    assert [c.message.content for c in answer.choices] == [c.message.content for c in again.choices]
    assert answer.usage.prompt_tokens == ask(client, 5).usage.prompt_tokens


def test_logprobs_are_of_the_tokens_of_the_text(client: openai.OpenAI) -> None:
    choice = ask(client, 6, logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == choice.message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob <= 0
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        assert entry.token == entry.top_logprobs[0].token  # greedy


def test_streamed_logprobs_are_the_same(client: openai.OpenAI) -> None:
    whole = ask(client, 6, logprobs=True, stop=["is"]).choices[0]
    chunks = ask(client, 6, logprobs=True, stop=["is"], stream=True)
    streamed = [
        entry.token
        for c in chunks
        for entry in (c.choices[0].logprobs.content if c.choices[0].logprobs else [])
    ]
    assert streamed == [entry.token for entry in whole.logprobs.content]


def test_completions(client: openai.OpenAI) -> None:
    recall = make_recall(7, 20)
    whole = client.completions.create(
        model=MODEL, prompt=recall.text, max_tokens=40, temperature=0, stop=["."]
    )
    assert whole.choices[0].text == " " + recall.fact.answer.removesuffix(".")
    echoed = client.completions.create(
        model=MODEL, prompt=recall.text, max_tokens=3, temperature=0, echo=True
    )
    assert echoed.choices[0].text.startswith(recall.text)
    both = client.completions.create(
        model=MODEL, prompt=[recall.text, "The"], max_tokens=2, n=2, temperature=0
    )
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[1].text
    ids = client.completions.create(
        model=MODEL, prompt=[5, 6, 7], max_tokens=2, logprobs=2, extra_body={"ignore_eos": True}
    )
    assert ids.usage.prompt_tokens == 3
    assert len(ids.choices[0].logprobs.tokens) == len(ids.choices[0].logprobs.text_offset) == 2
    stream = client.completions.create(
        model=MODEL, prompt=recall.text, max_tokens=40, temperature=0, stop=["."], stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "mixedkv"


def test_errors_have_openais_form(client: openai.OpenAI, server: Server) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.NotFoundError) as unknown:
        client.models.retrieve("gpt-4")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x " * 5000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(model=MODEL, messages=messages, tools=[{"type": "function"}])
    assert "tools" in tools.value.message
    with pytest.raises(openai.BadRequestError) as embeddings:
        client.embeddings.create(model=MODEL, input="x")
    assert embeddings.value.code == "embeddings_not_supported"


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"\xff\xfe", 400),
        (b'{"a":' * 5000, 400),
        (b" " * 2_000_000, 413),
    ],
)
def test_a_bad_body_is_refused(server: Server, raw: bytes, status: int) -> None:
    got, answer, _ = server.request("POST", "/v1/chat/completions", raw=raw)
    assert got == status
    assert answer["error"]["message"]


def test_unknown_paths_and_methods(server: Server) -> None:
    assert server.request("GET", "/v2/nothing")[1]["error"]["type"] == "not_found_error"
    assert server.status("GET", "/v1/chat/completions") == 405


def test_health_metrics_and_stats(server: Server, client: openai.OpenAI) -> None:
    ask(client, 8)
    assert server.status("GET", "/ready") == 200
    about = {"status": "ok", "version": __version__, "model": MODEL}
    assert server.request("GET", "/health")[:2] == (200, about)
    metrics = server.metrics()
    for name in ("num_requests_running", "time_to_first_token_seconds_bucket", "prefix_cache_hits_total"):
        assert f"mixedkv_{name}" in metrics
    stats = server.wait_until_idle()
    assert stats["sequences"]
    assert stats["layers"]
    assert stats["cache"]["cells_used"] <= sum(seq["tokens"] for seq in stats["sequences"])
    cache = stats["cache"]
    assert cache["checkpoints"] >= sum(seq["checkpoints"] > 0 for seq in stats["sequences"]) > 0
    assert cache["bytes_checkpoints"] > 0
    assert 'kv_cache_bytes{tier="checkpoints"}' in server.metrics()
    assert stats["recent"][0]["finish_reason"] == "stop"


def test_prompts_are_in_no_log_and_no_statistics(server: Server, client: openai.OpenAI) -> None:
    secret = "xyzzy-4711"
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": secret}], max_tokens=4)
    server.request("POST", "/v1/chat/completions", {"messages": [{"role": secret, "content": secret}]})
    assert secret not in server.log + json.dumps(server.stats()) + server.metrics()


def test_a_warm_prompt_is_found_by_many(server: Server) -> None:
    recall = make_recall(90, 20)
    warm = server.post("/v1/warm", {"messages": recall.messages[:2]})
    for question in ("Who?", "What then?"):
        body = {"messages": [*recall.messages[:2], {"role": "user", "content": question}], "max_tokens": 4}
        usage = server.post("/v1/chat/completions", body)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= warm["prompt_tokens"] - 1
        assert usage["prompt_tokens_details"]["cached_exact"]


def test_without_the_cache_nothing_is_kept(server: Server) -> None:
    """Not in the context either."""
    bodies: tuple[dict[str, Any], ...] = ({"max_tokens": 4}, {"max_tokens": 4, "n": 2})
    for i, body in enumerate(bodies):
        asked = {"messages": make_recall(96 + i, 10).messages, "temperature": 0}
        server.post("/v1/chat/completions", {**asked, **body, "use_kv_cache": False})
        again = server.post("/v1/chat/completions", {**asked, "max_tokens": 4})
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        again = server.post("/v1/chat/completions", {**asked, **body, "use_kv_cache": False})
        assert (
            again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        )  # what is kept now is not looked for


def test_a_session_does_not_grow_without_the_cache(server: Server) -> None:
    messages = make_recall(99, 10).messages
    made = {"model": MODEL, "messages": messages[:1], "session_id": "none-kept", "mode": "append"}
    server.post("/v1/context", made)
    body = {"session_id": "none-kept", "messages": messages[1:], "max_tokens": 4, "use_kv_cache": False}
    status, answer, _ = server.request("POST", "/v1/chat/completions", body)
    assert status == 400
    assert "use_kv_cache=false keeps nothing" in answer["error"]["message"]
    usage = server.post("/v1/chat/completions", {**body, "append": False})["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_an_answer_goes_back_under_its_message_id(server: Server) -> None:
    asked = {"role": "user", "content": make_recall(91, 20).text, "message_id": "m-1"}
    body = {"messages": [asked], "use_kv_cache": True, "temperature": 0, "max_tokens": 8}
    first = server.post("/v1/chat/completions", body)
    answer = first["choices"][0]["message"]
    body["messages"] = [asked, answer, {"role": "user", "content": "And then?", "message_id": "m-2"}]
    second = server.post("/v1/chat/completions", body)
    assert answer["message_id"] != second["choices"][0]["message"]["message_id"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]


def test_a_streamed_answer_carries_a_message_id_once(server: Server) -> None:
    messages = [{"role": "user", "content": "x"}]
    body = {"messages": messages, "use_kv_cache": True, "max_tokens": 4, "stream": True}
    events = str(server.post("/v1/chat/completions", body)).split("\n\n")
    assert '"role":"assistant"' in events[0]
    assert ["message_id" in event for event in events] == [True] + [False] * (len(events) - 1)


def test_a_refused_session_keeps_no_rows(server: Server) -> None:
    def n_kept() -> int:
        return sum(seq["state"] == "kept" for seq in server.stats()["sequences"])

    body = {"model": MODEL, "prompt": make_recall(94, 10).text, "ttl": 60, "session_id": "taken"}
    server.post("/v1/context", body)
    before = n_kept()
    again = {**body, "prompt": make_recall(95, 10).text}
    assert server.status("POST", "/v1/context", again) == 409
    assert n_kept() == before
    assert server.status("DELETE", "/v1/context/taken") == 200
    assert n_kept() == before - 1


def test_a_session_goes_before_the_prompt(server: Server) -> None:
    recall = make_recall(92, 20)
    made = server.post("/v1/context", {"model": MODEL, "messages": recall.messages[:2], "ttl": 60})
    path = f"/v1/context/{made['session_id']}"
    ask = {"messages": recall.messages[2:], "temperature": 0, "session_id": made["session_id"]}
    answer = server.post("/v1/chat/completions", ask)
    assert answer["choices"][0]["message"]["content"] == recall.fact.answer
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= made["n_tokens"] - 1
    assert server.request("PATCH", path, {"ttl": 600})[1]["ttl"] == 600
    assert server.request("GET", path)[1]["n_tokens"] == made["n_tokens"]
    assert server.request("DELETE", path)[1]["deleted"]
    for status, answer, _ in (
        server.request("GET", path),
        server.request("POST", "/v1/chat/completions", ask),
    ):
        assert (status, answer["error"]["code"]) == (404, "session_not_found")


@pytest.mark.parametrize("kind", ["messages", "prompt"])
def test_a_context_is_answered_in_the_same_call(server: Server, kind: str) -> None:
    recall = make_recall(94, 20)
    content = {kind: recall.messages if kind == "messages" else recall.text}
    body = {"model": MODEL, "ttl": 60, **content}
    made = server.post("/v1/context", {**body, "max_tokens": 12, "temperature": 0})
    choice = made["choices"][0]
    text = choice["message"]["content"] if kind == "messages" else choice["text"]
    assert recall.fact.answer in text
    assert 1 <= made["usage"]["completion_tokens"] <= 12
    assert "warnings" not in made
    assert server.request("GET", f"/v1/context/{made['session_id']}")[1]["n_tokens"] == made["n_tokens"]
    for wrong, match in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2, "mode": "append"}, "mode=prefix"),
    ):
        status, answer, _ = server.request("POST", "/v1/context", {**body, **wrong})
        assert status == 400
        assert match in answer["error"]["message"]


def test_a_context_takes_the_headers_of_aibrix(server: Server) -> None:
    def make(header: str, **body: Any) -> Any:
        data = {"model": MODEL, "prompt": "Say this is a test", **body}
        headers = {"Content-Type": "application/json", "x-session-ttl": header}
        return httpx.post(server.url + "/v1/context", json=data, headers=headers, timeout=60)

    made = make("77")
    assert (made.status_code, made.json()["ttl"]) == (201, 77)
    assert made.headers["x-session-id"] == made.json()["session_id"]
    assert make("77", ttl=50).json()["ttl"] == 50
    for wrong in ("0", "-1", "soon", "9" * 30, "1.5"):
        refused = make(wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-session-ttl")


def test_a_session_of_text_continues_as_text(server: Server) -> None:
    recall = make_recall(93, 20)
    journal, question = recall.text.split(" Question:")
    made = server.post("/v1/context", {"model": MODEL, "prompt": journal, "ttl": 60})
    body = {
        "prompt": " Question:" + question,
        "session_id": made["session_id"],
        "max_tokens": 40,
        "temperature": 0,
    }
    answer = server.post("/v1/completions", {**body, "stop": ["."]})
    assert answer["choices"][0]["text"].strip() == recall.fact.answer.removesuffix(".")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= made["n_tokens"] - 1


def test_accepted_connections_do_not_wait_for_full_packets() -> None:
    """A kept-alive client would get its first token 40 ms late."""

    async def nodelay() -> int:
        accepted = asyncio.get_running_loop().create_future()
        with listen(ServerSettings(port=0)) as listening:
            port = listening.getsockname()[1]
            async with await asyncio.start_server(
                lambda _, writer: accepted.set_result(writer), sock=listening
            ):
                _, client = await asyncio.open_connection("127.0.0.1", port)
                writer = await accepted
                option = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                for end in (client, writer):
                    end.close()
                return int(option)

    assert asyncio.run(nodelay())


@pytest.mark.parametrize("path", ["/", "/stats", "/page/chat.js"])
def test_pages_are_shown_in_no_frame(server: Server, path: str) -> None:
    status, _, headers = server.request("GET", path)
    assert status == 200
    assert headers["content-security-policy"].endswith("frame-ancestors 'none'")
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-cache"


def test_the_chat_loads_scripts_of_the_server_alone(server: Server) -> None:
    policy = server.request("GET", "/")[2]["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'" in policy
    assert "unsafe" not in policy
    for path in ("/page/", "/page/chat.html", "/page/..%2fsettings.py", "/page/none.js"):
        assert server.status("GET", path) == 404, path


def test_a_recurrent_model_is_served(zoo_path: Callable[[str], Path]) -> None:
    """All its layers keep a state: there are no rows to count."""
    with running("-m", str(zoo_path("mamba")), "--kv", "f16", "--n-ctx", "512") as server:
        body = {"prompt": [5, 6, 7] * 8, "max_tokens": 4, "ignore_eos": True}
        for _ in range(2):
            assert server.post("/v1/completions", body)["usage"]["completion_tokens"] == 4
        assert server.stats()["cache"]["kv"] == "none"
        assert server.status("GET", "/metrics") == 200
