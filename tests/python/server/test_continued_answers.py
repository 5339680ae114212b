"""What llama-server's clients rely on in chats: an answer that goes on from the last message, its limits and
its schema; and chats begin with BOS.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.servers.server import Server, running

pytestmark = pytest.mark.full

HI = {"role": "user", "content": "Who was in the mill?"}
BEGUN = {"role": "assistant", "content": "The one who was there is"}
CHAT = {"messages": [HI], "max_tokens": 8, "temperature": 0}
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--n-ctx", "1024", "--parallel", "1") as server:
        yield server


def prompt(server: Server, body: dict[str, object]) -> str:
    return str(server.post("/apply-template", body)["prompt"])


def test_an_answer_goes_on_from_the_last_message_of_the_assistant(server: Server) -> None:
    begun = {**CHAT, "messages": [HI, BEGUN]}
    rendered = prompt(server, {"messages": begun["messages"]})
    assert rendered == prompt(server, {"messages": [HI]}) + BEGUN["content"]
    both = [
        server.post("/v1/chat/completions", {**begun, **more})
        for more in ({}, {"continue_final_message": True})
    ]
    assert both[0]["choices"] == both[1]["choices"]
    assert both[0]["usage"]["prompt_tokens"] == both[1]["usage"]["prompt_tokens"]
    ollama = server.post(
        "/api/chat", {"messages": begun["messages"], "stream": False, "options": {"num_predict": 1}}
    )
    assert ollama["prompt_eval_count"] == both[0]["usage"]["prompt_tokens"]


def test_unless_that_is_not_wanted_or_cannot_be(server: Server, tmp_path: Path) -> None:
    turn = prompt(server, {"messages": [HI, BEGUN], "continue_final_message": False})
    assert turn.startswith(prompt(server, {"messages": [HI]}) + BEGUN["content"])
    assert not turn.endswith(BEGUN["content"])
    with running("--n-ctx", "512", "--chat-format", "llama-2") as named:
        assert named.post("/v1/chat/completions", {**CHAT, "messages": [HI, BEGUN]})["choices"]


def test_a_chat_without_the_beginning_of_an_answer_is_refused(server: Server) -> None:
    for path in ("/apply-template", "/v1/chat/completions"):
        body = {**CHAT, "messages": [HI]} if path.startswith("/v1") else {"messages": [HI]}
        assert server.post(path, {**body, "add_generation_prompt": True})
        _, _, headers = server.request("POST", path, {**body, "add_generation_prompt": True})
        assert "x-ignored-fields" not in headers
        status, answer, _ = server.request("POST", path, {**body, "add_generation_prompt": False})
        assert status == 400
        assert answer["error"]["message"].startswith("add_generation_prompt: false is not supported")
        assert "/v1/completions" in answer["error"]["message"]


def test_what_goes_on_from_the_last_message_begins_no_other(server: Server) -> None:
    """vLLM and transformers ask for both fields."""
    begun = {"messages": [HI, BEGUN]}
    expected = prompt(server, {**begun, "continue_final_message": True})
    for more in ({}, {"continue_final_message": True}):
        assert prompt(server, {**begun, **more, "add_generation_prompt": False}) == expected
        assert server.post("/v1/chat/completions", {**CHAT, **begun, **more, "add_generation_prompt": False})
    for first, goes_on in ((True, True), (False, False)):
        body = {**CHAT, **begun, "add_generation_prompt": first, "continue_final_message": goes_on}
        status, answer, _ = server.request("POST", "/v1/chat/completions", body)
        assert (status, answer["error"]["param"]) == (400, "add_generation_prompt")


def test_a_chat_begins_with_bos_where_its_template_has_none(tmp_path: Path) -> None:
    (tmp_path / "plain.jinja").write_text(PLAIN)
    with running("--n-ctx", "512", "--chat-format", str(tmp_path / "plain.jinja")) as plain:
        text = prompt(plain, {"messages": [HI]})
        tokens = {
            special: plain.post("/tokenize", {"content": text, "add_special": special})["tokens"]
            for special in (True, False)
        }
        used = plain.post("/v1/chat/completions", {**CHAT, "max_tokens": 1})["usage"]["prompt_tokens"]
        assert used == len(tokens[True]) == len(tokens[False]) + 1


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_minus_one_is_as_many_tokens_as_fit(name: str, server: Server) -> None:
    body = {"messages": [HI], "temperature": 0, name: -1, "stop": ["\n"]}
    assert server.post("/v1/chat/completions", body)["choices"][0]["finish_reason"] in ("stop", "length")


def test_a_schema_at_the_top_of_a_chat(server: Server) -> None:
    answer = server.post("/v1/chat/completions", {**CHAT, "max_tokens": 20, "json_schema": {"const": "42"}})
    assert json.loads(answer["choices"][0]["message"]["content"]) == "42"
    assert "warnings" not in answer


@pytest.mark.parametrize("name", ["llama-2", "llama2", "llama-3", "vicuna", "baichuan-2", "chatml"])
def test_names_of_formats_are_those_of_llama_cpp_python(name: str) -> None:
    from mixedkv.native.chat_formats import find_format, format_name

    assert find_format(name) is not None
    assert format_name(name) == {"llama2": "llama-2"}.get(name, name)
    assert find_format("odd") is None
