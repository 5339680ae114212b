"""llama-server's own API: what its clients send to /completion and ask of /props."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.servers.server import MODEL, Server, running

pytestmark = pytest.mark.full

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


def test_probabilities_after_the_samplers(server: Server) -> None:
    body = {**BODY, "n_probs": 5, "post_sampling_probs": True, "temperature": 1, "seed": 4, "top_k": 3}
    body |= {"top_p": 1, "min_p": 0}
    places = server.post("/completion", body)["completion_probabilities"]
    plain = server.post("/completion", {**body, "post_sampling_probs": False})
    assert [place["id"] for place in places] == [place["id"] for place in plain["completion_probabilities"]]
    for place, model in zip(places, plain["completion_probabilities"], strict=True):
        assert sum(each["prob"] for each in place["top_probs"]) == pytest.approx(1, abs=1e-4)
        assert [each["id"] for each in place["top_probs"]] == [
            each["id"] for each in model["top_logprobs"][:3]
        ]
        assert place["prob"] in [each["prob"] for each in place["top_probs"]]
    greedy = server.post("/completion", {**body, "temperature": 0})["completion_probabilities"]
    assert all([each["prob"] for each in place["top_probs"]] == [1] for place in greedy)
    forced = server.post("/completion", {**body, "grammar": 'root ::= "seven"'})
    assert forced["content"] == "seven"
    assert all(0 < place["prob"] <= 1 for place in forced["completion_probabilities"])


def test_biases_are_pairs_or_an_object(server: Server) -> None:
    first = server.post("/completion", {**BODY, "n_probs": 1})["completion_probabilities"][0]["id"]
    pairs = server.post("/completion", {**BODY, "n_probs": 1, "logit_bias": [[first, False]]})
    as_object = server.post("/completion", {**BODY, "logit_bias": {str(first): -100}})
    assert pairs["content"] == as_object["content"]
    assert pairs["completion_probabilities"][0]["id"] != first


def test_false_is_never_and_a_text_its_tokens(server: Server) -> None:
    red = {**BODY, "prompt": "red green blue red green blue red green blue red green"}
    said = server.post("/completion", red)["content"]
    word = said.split()[0]
    (token,) = server.post("/tokenize", {"content": f" {word}"})["tokens"][-1:]
    for path, key in (("/completion", "content"), ("/v1/completions", "choices")):
        for bias in (
            [[token, False]],
            {str(token): False},
            [[token, -100], [token, 5]],
            [[token, 100], [token, False]],
        ):
            answer = server.post(path, {**red, "logit_bias": bias})[key]
            text = answer if isinstance(answer, str) else answer[0]["text"]
            found = server.post("/tokenize", {"content": text})["tokens"]
            assert token not in found, (path, bias, text)
    for bias in ([[f" {word}", False]], {f" {word}": False}):
        answer = server.post("/completion", {**red, "logit_bias": bias})["content"]
        assert token not in server.post("/tokenize", {"content": answer})["tokens"], bias


def test_the_penalty_looks_at_as_many_tokens_as_asked(server: Server) -> None:
    body = {**BODY, "prompt": "BANANA APPLE CHERRY " * 30, "n_predict": 24, "ignore_eos": True}
    off = server.post("/completion", body)["content"]
    on = server.post("/completion", {**body, "repeat_penalty": 1.5})["content"]
    assert on != off
    for n, expected in ((0, off), (64, on)):
        asked = {**body, "repeat_penalty": 1.5, "repeat_last_n": n}
        assert server.post("/completion", asked)["content"] == expected
    # the whole context: a token at its beginning only
    far = {**body, "prompt": "mill " + "BANANA APPLE CHERRY " * 40, "repeat_penalty": 1.9, "n_probs": 1}
    found = [server.post("/completion", {**far, "repeat_last_n": n})["content"] for n in (-1, N_CTX, 3, 1)]
    assert found[0] == found[1] != found[3]
    options = {"num_predict": 24, "temperature": 0, "repeat_penalty": 1.5, "repeat_last_n": 0}
    ollama = {"prompt": body["prompt"], "raw": True, "stream": False, "options": options}
    assert server.post("/api/generate", ollama)["response"].startswith(off[:20])


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
    body = {**BODY, "id_slot": -1, "n_keep": 0}
    plain = server.post("/completion", BODY)
    status, answer, headers = server.request("POST", "/completion", body)
    assert (status, answer["content"]) == (200, plain["content"])
    named = headers["x-ignored-fields"].replace(" ", "").split(",")
    assert sorted(named) == ["id_slot", "n_keep"]


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0}
_PLACES = {"/completion": BODY, "/v1/completions": BODY, "/v1/chat/completions": CHAT}


@pytest.mark.parametrize("path", _PLACES)
def test_no_tokens_evaluate_the_prompt(server: Server, path: str) -> None:
    """As llama.vim warms the server up: what it then sends along finds the rows."""
    n, body = f"{path} needs a prompt of its own. " * 4, _PLACES[path]
    body = {**body, **({"prompt": n} if "prompt" in body else {"messages": [{"role": "user", "content": n}]})}
    warmed = server.post(path, {**body, "n_predict": 0})
    assert (
        warmed["tokens_predicted"] if path == "/completion" else warmed["usage"]["completion_tokens"]
    ) == 0
    found = server.post(path, {**body, "n_predict": 3})
    if path == "/completion":
        assert found["tokens_predicted"] == 3
        assert found["tokens_cached"] == found["tokens_evaluated"] - 1
    else:
        assert found["usage"]["completion_tokens"] == 3
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == found["usage"]["prompt_tokens"] - 1


def test_an_answer_tells_what_it_was_made_with(server: Server) -> None:
    body = {
        **BODY,
        "seed": 7,
        "stop": ["\n\n\n"],
        "top_k": 5,
        "logit_bias": {"9": 1.5},
        "samplers": ["top_k"],
    }
    answer = server.post("/completion", body)
    settings = answer["generation_settings"]
    assert (settings["seed"], settings["n_predict"], settings["top_k"]) == (7, 8, 5)
    assert settings["stop"] == ["\n\n\n"]
    assert settings["samplers"] == ["top_k"]
    assert settings["logit_bias"] == [{"token": 9, "bias": 1.5}]
    assert answer["prompt"].endswith(PROMPT)
    assert answer["has_new_line"] == ("\n" in answer["content"])
    endless = server.post("/completion", {**BODY, "n_predict": -1})
    assert endless["generation_settings"]["n_predict"] == -1


def test_tokens_of_an_answer(server: Server) -> None:
    assert server.post("/completion", BODY)["tokens"] == []
    tokens = server.post("/completion", {**BODY, "return_tokens": True})["tokens"]
    assert len(tokens) == 8
    *pieces, end = server.events("/completion", BODY)
    assert [token for piece in pieces for token in piece["tokens"]] == tokens[
        : len(tokens) - len(end["tokens"])
    ]
    text = server.post("/detokenize", {"tokens": tokens})["content"]
    assert text == server.post("/completion", BODY)["content"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_fields_that_are_chosen(server: Server, is_streamed: bool) -> None:
    body = {
        **BODY,
        "response_fields": ["content", "generation_settings/n_predict", "stop", "nothing", "stop/x"],
    }
    last = server.events("/completion", body)[-1] if is_streamed else server.post("/completion", body)
    assert last.keys() == {"content", "generation_settings/n_predict", "stop"}
    assert last["generation_settings/n_predict"] == 8
    assert server.post("/completion", {**BODY, "response_fields": [""]}) == {}


def test_an_answer_that_ends_with_the_context_is_truncated(server: Server) -> None:
    body = {**BODY, "ignore_eos": True}
    assert server.post("/completion", {**body, "n_predict": -1})["truncated"] is True
    assert server.post("/completion", body)["truncated"] is False


def test_prompts_of_texts_and_tokens(server: Server) -> None:
    tokens = server.post("/tokenize", {"content": PROMPT, "add_special": True})["tokens"]
    half = len(tokens) // 2
    rest = server.post("/detokenize", {"tokens": tokens[half:]})["content"]
    expected = server.post("/completion", BODY)["content"]
    for prompt in ({"prompt_string": PROMPT}, tokens):
        assert server.post("/completion", {**BODY, "prompt": prompt})["content"] == expected
    both = server.post("/completion", {**BODY, "prompt": [*tokens[:half], rest]})
    assert both["prompt"] == server.post("/completion", BODY)["prompt"]
    several = server.post("/completion", {**BODY, "prompt": [PROMPT, tokens, {"prompt_string": PROMPT}]})
    assert [each["content"] for each in several] == [expected] * 3


def test_the_samplers_that_are_named_choose(server: Server) -> None:
    """Without `temperature` among them it is 1; with `top_k` of 1 alone the likeliest is taken."""
    body = {**BODY, "n_predict": 16, "seed": 3, "top_k": 1}
    greedy = server.post("/completion", {**BODY, "n_predict": 16})["content"]
    for samplers in (["top_k"], "k", ["temperature"], ["top_p", "top_k", "typ_p", "typical_p"]):
        assert server.post("/completion", {**body, "samplers": samplers})["content"] == greedy
    assert server.post("/completion", {**body, "samplers": []})["content"] != greedy
    assert (
        server.post("/completion", {**body, "samplers": "pt", "temperature": 5, "top_p": 1})["content"]
        != greedy
    )


def test_samplers_have_their_order(server: Server) -> None:
    """A nucleus of hot logits is wider than one that is cut before they are heated."""
    body = {**BODY, "n_predict": 200, "ignore_eos": True, "seed": 5, "temperature": 3, "top_p": 0.5}
    cold = server.post("/completion", {**body, "samplers": ["top_p", "temperature"], "return_tokens": True})
    hot = server.post("/completion", {**body, "samplers": ["temperature", "top_p"], "return_tokens": True})
    assert len(set(cold["tokens"])) < len(set(hot["tokens"]))


def test_an_answer_ends_with_a_line_when_its_time_is_over(server: Server) -> None:
    grammar = 'root ::= ("x" "\\n")+'
    body = {**BODY, "grammar": grammar, "n_predict": 400, "t_max_predict_ms": 1}
    answer = server.post("/completion", body)
    assert answer["tokens_predicted"] < 400
    assert answer["content"].endswith("\n")
    assert (answer["stop_type"], answer["truncated"]) == ("limit", False)
    without = server.post(
        "/completion", {**BODY, "grammar": 'root ::= "x"+', "n_predict": 40, "t_max_predict_ms": 1}
    )
    assert without["tokens_predicted"] == 40  # no line ends


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_ends_where_a_line_is_indented_too_little(server: Server, is_streamed: bool) -> None:
    grammar = 'root ::= "a\\n    b\\n     c\\n  d\\n    e"'
    body = {**BODY, "grammar": grammar, "n_predict": 200, "n_indent": 4}
    events = server.events("/completion", body) if is_streamed else [server.post("/completion", body)]
    assert "".join(event["content"] for event in events) == "a\n    b\n     c\n  "
    assert events[-1]["stop_type"] == "limit"
    assert server.post("/completion", {**body, "n_indent": 2})["content"].endswith("    e")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_speed_is_told_where_it_is_asked_for(server: Server, path: str) -> None:
    body = {**_PLACES[path], "n_predict": None, "max_tokens": 5, "timings_per_token": True}
    times = server.post(path, body)["timings"]
    assert times["predicted_n"] == 5
    assert times["predicted_per_second"] == pytest.approx(4 / times["predicted_ms"] * 1000, rel=0.01)
    assert "timings" not in server.post(path, {**body, "timings_per_token": None})
    events = server.events(path, {**body, "stream_options": {"include_usage": True}})
    told = [event["timings"]["predicted_n"] for event in events if "timings" in event]
    assert len(told) >= 3
    assert told == sorted(told)
    assert "timings" in events[-1]
    if path == "/v1/chat/completions":
        assert "timings" not in events[0]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_verbose_answer_tells_its_prompt(server: Server, path: str) -> None:
    body = {**_PLACES[path], "n_predict": 2}
    told = server.post(path, {**body, "verbose": True})["__verbose"]
    assert PROMPT in told["prompt"]
    assert (told["tokens_predicted"], told["generation_settings"]["n_predict"]) == (2, 2)
    assert "__verbose" not in server.post(path, {**body, "verbose": False})
    if path == "/v1/completions":  # OpenAI's default
        default = server.post(path, {"prompt": PROMPT, "verbose": True})["__verbose"]
        assert default["generation_settings"]["n_predict"] == 16


def test_speed_and_progress_of_a_response(server: Server) -> None:
    body = {"input": "The speed of a response is told. " * 60, "max_output_tokens": 6, "temperature": 0}
    lines = server.post(
        "/v1/responses", {**body, "stream": True, "timings_per_token": True, "return_progress": True}
    ).splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    progress = [event for event in events if "prompt_progress" in event]
    assert all(event["type"] == "response.in_progress" for event in progress)
    assert progress
    timed = {event["type"] for event in events if "timings" in event}
    assert timed == {"response.output_text.delta", events[-1]["type"]}


def test_the_first_token_takes_no_step(server: Server) -> None:
    times = server.post("/completion", {**BODY, "n_predict": 1})["timings"]
    assert (times["predicted_n"], times["predicted_per_second"], times["predicted_per_token_ms"]) == (
        1,
        0.0,
        0.0,
    )


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_prompt_that_is_too_long_has_llama_servers_type(server: Server, path: str) -> None:
    text = "The mill is old. " * 3000
    body = {"prompt": text} if "chat" not in path else {"messages": [{"role": "user", "content": text}]}
    status, answer, _ = server.request("POST", path, {"input": text} if "responses" in path else body)
    error = answer["error"]
    assert (status, error["type"], error["code"]) == (
        *(400, "exceed_context_size_error", "context_length_exceeded"),
    )
    assert error["n_prompt_tokens"] > error["n_ctx"] == N_CTX
    assert "exceeds the available context size" in error["message"]


def test_tokens_of_prompts_are_counted(server: Server) -> None:
    expected = server.post("/v1/chat/completions", {**CHAT, "max_tokens": 1})["usage"]["prompt_tokens"]
    for path in ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"):
        assert server.post(path, CHAT)["input_tokens"] == expected
    assert server.post("/v1/responses/input_tokens", {"input": PROMPT})["input_tokens"] == expected
