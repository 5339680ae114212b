"""llama-server's own API: what its clients send to /completion and ask of /props."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.server_support import MODEL, Server, running

N_CTX = 2048
PROMPT = "The lamp lies in the"
BODY: dict[str, Any] = {"prompt": PROMPT, "n_predict": 8, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--n-ctx", str(N_CTX), "--parallel", "3") as server:
        yield server


def openai_text(server: Server, prompt: str | list[int], n: int) -> str:
    body = {"prompt": prompt, "max_tokens": n, "temperature": 0}
    text: str = server.post("/v1/completions", body)["choices"][0]["text"]
    return text


def test_an_answer_is_that_of_openais_api(server: Server) -> None:
    answer = server.post("/completion", BODY)
    assert answer["content"] == openai_text(server, PROMPT, 8) != ""
    assert (answer["stop"], answer["stop_type"], answer["truncated"]) == (True, "limit", False)
    assert (answer["tokens_predicted"], answer["model"]) == (8, MODEL)
    times = answer["timings"]
    assert times["prompt_n"] + times["cache_n"] == answer["tokens_evaluated"]
    assert times["predicted_n"] == 8
    assert times["predicted_per_second"] > 0


def test_each_api_says_whether_an_answer_is_exact(server: Server) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
    for path, body, place in (
        ("/completion", BODY, ()),
        ("/api/generate", {"model": MODEL, "prompt": PROMPT, "stream": False}, ()),
        ("/v1/messages", chat, ("usage",)),
        ("/v1/responses", {"model": MODEL, "input": PROMPT, "max_output_tokens": 16}, ("usage",)),
    ):
        found = server.post(path, body)
        for name in place:
            found = found[name]
        details = found["input_tokens_details" if path == "/v1/responses" else "prompt_tokens_details"]
        assert details["cached_exact"] is True


def test_a_stream_as_an_editor_reads_it(server: Server) -> None:
    """With all that Continue's client of llama.cpp sends along."""
    body = {
        **BODY,
        "top_k": 40,
        "top_p": 1,
        "min_p": 0,
        "mirostat": 0,
        "repeat_penalty": 1.0,
        "stop": ["\n\n\n"],
    }
    chunks = server.events("/completion", body)
    assert "".join(chunk["content"] for chunk in chunks) == openai_text(server, PROMPT, 8)
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["stop_type"] == "limit"


def test_tokens_and_several_prompts(server: Server) -> None:
    tokens = server.post("/tokenize", {"content": PROMPT, "add_special": True})["tokens"]
    assert server.post("/completion", {**BODY, "prompt": tokens})["content"] == openai_text(server, tokens, 8)
    several = server.post("/completion", {**BODY, "prompt": [PROMPT, "A boat"]})
    assert [answer["index"] for answer in several] == [0, 1]
    assert [each["content"] for each in several] == [openai_text(server, p, 8) for p in (PROMPT, "A boat")]


def test_a_prompt_that_is_not_kept_is_evaluated_whole(server: Server) -> None:
    prompt = "A prompt of some words which nobody else has sent, so that it can be found again."
    server.post("/completion", {**BODY, "prompt": prompt})
    assert server.post("/completion", {**BODY, "prompt": prompt})["tokens_cached"] > 0
    alone = server.post("/completion", {**BODY, "prompt": prompt, "cache_prompt": False})
    assert alone["tokens_cached"] == 0


def test_schemas_and_stops(server: Server) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    answer = server.post("/completion", {**BODY, "n_predict": 64, "json_schema": schema})
    assert isinstance(json.loads(answer["content"])["n"], int)
    assert answer["stop_type"] == "eos"
    word = openai_text(server, PROMPT, 8).split()[1]
    stopped = server.post("/completion", {**BODY, "stop": [word]})
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", word)
    assert word not in stopped["content"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_probabilities_have_ids(server: Server, is_streamed: bool) -> None:
    body = {**BODY, "n_probs": 3}
    chunks = server.events("/completion", body) if is_streamed else [server.post("/completion", body)]
    places = [place for chunk in chunks for place in chunk["completion_probabilities"]]
    assert len(places) == 8
    for place in places:
        assert len(place["top_logprobs"]) == 3
        assert place["id"] == place["top_logprobs"][0]["id"]  # it was sampled greedily
        assert place["logprob"] == pytest.approx(place["top_logprobs"][0]["logprob"], abs=1e-5)


def test_biases_are_pairs_or_an_object(server: Server) -> None:
    first = server.post("/completion", {**BODY, "n_probs": 1})["completion_probabilities"][0]["id"]
    pairs = server.post("/completion", {**BODY, "n_probs": 1, "logit_bias": [[first, False]]})
    as_object = server.post("/completion", {**BODY, "logit_bias": {str(first): -100}})
    assert pairs["content"] == as_object["content"]
    assert pairs["completion_probabilities"][0]["id"] != first


def test_seeds_below_zero_are_another_one_each_time(server: Server) -> None:
    body = {**BODY, "n_predict": 24, "temperature": 2, "top_k": 0, "top_p": 1, "min_p": 0}
    for seed, n in ((7, 1), (-1, 4)):
        found = {server.post("/completion", {**body, "seed": seed})["content"] for _ in range(4)}
        assert len(found) == n


def test_a_long_prompt_ends_with_the_context(server: Server) -> None:
    tokens = server.post("/tokenize", {"content": "The mill is old. " * 1000})["tokens"][: N_CTX - 50]
    body = {"prompt": tokens, "n_predict": -1, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
    last = server.events("/completion", body)[-1]
    assert last["tokens_evaluated"] + last["tokens_predicted"] == N_CTX
    assert last["stop_type"] == "limit"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_predict": 0}, "/v1/warm"),
        ({"n_predict": -2}, "n_predict"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "grammar and json_schema"),
        ({"logit_bias": [[1]]}, "logit_bias"),
        ({"session_id": "x"}, "session_id"),
        ({"json_schema": {"type": "nothing"}}, "json_schema"),
    ],
)
def test_bad_requests_name_the_field(server: Server, change: dict[str, Any], said: str) -> None:
    status, answer, _ = server.request("POST", "/completion", {**BODY, **change})
    assert status == 400, answer
    assert said in answer["error"]["message"] or said in (answer["error"]["param"] or "")


def test_what_a_client_asks_before_it_begins(server: Server) -> None:
    _, props, _ = server.request("GET", "/props")
    assert props["default_generation_settings"]["n_ctx"] == N_CTX
    assert (props["total_slots"], props["model_alias"]) == (3, MODEL)
    assert "/" not in props["model_path"]
    assert props["model_path"].endswith(".gguf")
    assert "messages" in props["chat_template"]
    assert props["modalities"] == {"vision": False, "audio": False}


def test_the_template_is_the_one_that_chats_are_written_with(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (tmp_path / "plain.jinja").write_text(template)
    with running("--n-ctx", "512", "--chat-format", str(tmp_path / "plain.jinja")) as plain:
        assert plain.request("GET", "/props")[1]["chat_template"] == template
        assert plain.post("/api/show", {"model": MODEL})["template"] == template


def test_fields_about_slots_are_ignored_and_named(server: Server) -> None:
    body = {**BODY, "id_slot": -1, "n_keep": 0, "samplers": ["top_k"]}
    plain = server.post("/completion", BODY)
    status, answer, headers = server.request("POST", "/completion", body)
    assert (status, answer["content"]) == (200, plain["content"])
    named = headers["x-ignored-fields"].replace(" ", "").split(",")
    assert sorted(named) == ["id_slot", "n_keep", "samplers"]
