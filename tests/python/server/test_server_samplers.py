"""Samplers of llama.cpp by their names, and when an answer may end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.servers.server import Server, running

pytestmark = pytest.mark.full

PROMPT = "The code of the mill is 4817. The code of the mill is"
N = 24
USER = {"role": "user", "content": "x"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--n-ctx", "2048") as server:
        yield server


def complete(server: Server, **options: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": N, "seed": 5, "use_kv_cache": False, **options}
    return server.post("/v1/completions", body)["choices"][0]


def text(server: Server, **options: Any) -> str:
    answer = complete(server, ignore_eos=True, **options)["text"]
    assert isinstance(answer, str)
    return answer


@pytest.mark.parametrize(
    "narrow",
    [
        {"top_n_sigma": 1e-6},
        {"dynatemp_range": 0.001, "temperature": 0.001},
        {"mirostat": 2, "mirostat_tau": 0.0},
        {"mirostat": 1, "mirostat_tau": 0.0},
    ],
)
def test_a_sampler_that_leaves_one_token_is_greedy(server: Server, narrow: Any) -> None:
    assert text(server, **{"temperature": 2.0, **narrow}) == text(server, temperature=0)


@pytest.mark.parametrize(
    "change",
    [
        {"xtc_probability": 1.0, "xtc_threshold": 0.01},
        {"adaptive_target": 0.05, "adaptive_decay": 0.5},
        {"mirostat": 2, "mirostat_tau": 8.0},
        {"dynatemp_range": 2.0},
        {"top_n_sigma": 0.2},
        {"typical_p": 0.2},
    ],
)
def test_a_sampler_changes_the_answer(server: Server, change: Any) -> None:
    assert text(server, temperature=1.5, **change) != text(server, temperature=1.5)


def test_dry_keeps_an_answer_from_repeating_itself(server: Server) -> None:
    def repeats(said: str) -> int:
        return max(said.count(said[at : at + 8]) for at in range(len(said) - 8))

    prompt = "red blue green " * 12
    plain = text(server, prompt=prompt, temperature=0, max_tokens=80)
    dry = text(
        server, prompt=prompt, temperature=0, max_tokens=80, dry_multiplier=5.0, dry_sequence_breakers=[]
    )
    assert repeats(dry) < repeats(plain)


def end_of(server: Server) -> int:
    """A token that the greedy answer has early."""
    answer = complete(server, temperature=0, logprobs=0, ignore_eos=True)
    (token,) = server.post("/tokenize", {"content": answer["logprobs"]["tokens"][2]})["tokens"]
    return int(token)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/api/generate"])
def test_top_k_of_minus_1_is_off(server: Server, path: str) -> None:
    asked = {"prompt": "x"} if path in ("/v1/completions", "/api/generate") else {"messages": [USER]}
    for top_k in (-1, 0, 40):
        limits: dict[str, Any] = {"top_k": top_k, "max_tokens": 1}
        if path == "/api/generate":
            limits = {"stream": False, "options": {"top_k": top_k, "num_predict": 1}}
        assert server.status("POST", path, {**asked, **limits}) == 200


def test_a_stop_token_ends_the_answer_and_is_no_part_of_it(server: Server) -> None:
    whole = complete(server, temperature=0, ignore_eos=True)["text"]
    answer = complete(server, temperature=0, stop_token_ids=[end_of(server)])
    assert answer["finish_reason"] == "stop"
    assert whole.startswith(answer["text"])
    assert len(answer["text"]) < len(whole)


def test_an_answer_does_not_end_before_its_least_length(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": N, "temperature": 0, "stop_token_ids": [end_of(server)]}
    short = server.post("/v1/completions", body)["usage"]["completion_tokens"]
    long = server.post("/v1/completions", {**body, "min_tokens": N})["usage"]["completion_tokens"]
    assert short < N
    assert long == N


def test_a_least_length_and_a_constraint_go_together(server: Server) -> None:
    """What is complete ends all the same: there is nothing else to say."""
    assert complete(server, regex="[0-9]{3}", min_tokens=N)["text"].isdigit()
    assert len(complete(server, regex="[0-9]{2,9}", min_tokens=9, temperature=0)["text"]) > 2
