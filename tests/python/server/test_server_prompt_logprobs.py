"""Log probabilities of a prompt's tokens are those of the model's logits, whatever else is evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from support.servers.server import MODEL, Direct, Server, end_of, running

pytestmark = pytest.mark.full

TEXT = "The code of the mill is 4817. " * 24
N_TOP = 3
TYPICAL = 0.001  # sums in another order, and rows of 16 bits
LEVEL = 0.25  # an activation that falls to its next level of eight bits changes this row and those after it


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--n-ctx", "2048", "--kv", "f16") as server:
        yield server


@pytest.fixture(scope="module")
def tokens(server: Server) -> list[int]:
    tokens: list[int] = server.post("/tokenize", {"content": TEXT, "add_special": True})["tokens"]
    assert len(tokens) > 100
    return tokens


@pytest.fixture(scope="module")
def expected(tokens: list[int]) -> np.ndarray:
    """By llama-cpp-python: [n_tokens - 1, n_vocab]."""
    with Llama(model_path(), kv="f16", n_ctx=2048, n_threads=1, logits_all=True, verbose=False) as llm:
        llm.eval(tokens)
        logits = llm.scores[: len(tokens) - 1].astype(np.float64)
    return (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1))[:, None]
        - logits.max(1)[:, None]
    )


def check(given: Any, tokens: list[int], expected: np.ndarray) -> None:
    assert len(given) == len(tokens)
    assert given[0] is None
    differences = []
    for entries, token, row in zip(given[1:], tokens[1:], expected, strict=True):
        assert N_TOP <= len(entries) <= N_TOP + 1
        differences += [abs(entry["logprob"] - row[int(name)]) for name, entry in entries.items()]
        best = sorted((entry["logprob"] for entry in entries.values()), reverse=True)[:N_TOP]
        assert best == pytest.approx(np.sort(row)[::-1][:N_TOP], abs=LEVEL)
        rank = entries[str(token)]["rank"]
        assert (row > row[token] + 2 * LEVEL).sum() < rank <= (row > row[token] - 2 * LEVEL).sum() + 1
    assert max(differences) < LEVEL
    if len(tokens) > 20:  # of a few rows that one may be most
        assert np.median(differences) < TYPICAL


def test_they_are_those_of_the_logits(server: Server, tokens: list[int], expected: np.ndarray) -> None:
    body = {"prompt": tokens, "max_tokens": 2, "prompt_logprobs": N_TOP}
    for _ in range(2):  # the second time its rows are there
        answer = server.post("/v1/completions", body)
        check(answer["choices"][0]["prompt_logprobs"], tokens, expected)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = server.post("/v1/completions", {**body, "prompt_logprobs": None})
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(tokens) - 1, "its rows are shared"
    assert "prompt_logprobs" not in again["choices"][0]


def test_choices_and_prompts_have_their_own(server: Server, tokens: list[int], expected: np.ndarray) -> None:
    prompts = [tokens, tokens[:50]]
    answer = server.post(
        "/v1/completions", {"prompt": prompts, "n": 2, "max_tokens": 1, "prompt_logprobs": N_TOP}
    )
    for choice in answer["choices"]:
        prompt = prompts[choice["index"] // 2]
        check(choice["prompt_logprobs"], prompt, expected[: len(prompt) - 1])


def test_company_changes_nothing(server: Server, tokens: list[int], expected: np.ndarray) -> None:
    def ask(n: int) -> Any:
        body = {"prompt": tokens[:n], "max_tokens": 4, "prompt_logprobs": N_TOP}
        return server.post("/v1/completions", body)["choices"][0]["prompt_logprobs"]

    lengths = [120, 3, 77, 2]
    with ThreadPoolExecutor(6) as pool:
        long = pool.submit(
            server.post, "/v1/completions", {"prompt": TEXT, "max_tokens": 100, "ignore_eos": True}
        )
        for n, given in zip(lengths, pool.map(ask, lengths), strict=True):
            check(given, tokens[:n], expected[: n - 1])
        long.result()


def test_a_chat_has_them_for_all_of_its_prompt(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    answer: Any = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Which code?"}],
        max_tokens=2,
        extra_body={"prompt_logprobs": 0},
    )
    assert answer.prompt_logprobs[0] is None
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens
    names = [next(iter(entries.values()))["decoded_token"] for entries in answer.prompt_logprobs[1:]]
    assert "Which code?" in "".join(names)


@pytest.mark.parametrize(("kv", "tolerance"), [("f16", LEVEL), ("mixed", 0.3)])
def test_slices_and_an_evaluation_that_begins_anew_are_one_prompt(kv: str, tolerance: float) -> None:
    """Now and then an activation falls to its next level, and with four bits an element of a row."""
    with Direct(kv=kv, n_ctx=1024) as direct:
        tokens = direct.tokens(TEXT)[:200]
        found = []
        for most in (200, 7):
            job, events = direct.job(tokens, 3, prompt_logprobs=2)
            job.most_in_step = most
            direct.engine.submit_jobs([job])
            end_of(events)
            asked = job.answer.prompt_logprobs
            assert asked is not None
            found.append(np.array([each.logprob for each, _ in asked.found]))
        assert found[0].shape == (199,)
        difference = np.abs(found[0] - found[1])
        assert difference.max() < tolerance
        assert np.median(difference) < 0.01
        before = list(asked.found)
        direct.call(lambda: asked.take(direct.llm.ctx, 0, 0, 10))  # evaluated again
        assert asked.found == before


def echoed(server: Server, prompt: Any, **options: Any) -> dict[str, Any]:
    """The text and the log probabilities of the first choice."""
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 1, "temperature": 0, **options}
    if not options.get("stream"):
        choice = server.post("/v1/completions", body)["choices"][0]
        assert "prompt_logprobs" not in choice
        return {"text": choice["text"], **choice["logprobs"]}
    whole: dict[str, Any] = {"text": ""}
    for chunk in server.events("/v1/completions", body):
        choice = chunk["choices"][0]
        whole["text"] += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            whole[name] = [*whole.get(name, []), *values]
    return whole


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 4])
def test_an_echo_has_the_log_probabilities_of_the_prompt(
    server: Server, tokens: list[int], expected: np.ndarray, max_tokens: int, stream: bool
) -> None:
    """Also after the prompt was found in the context, as harnesses score many ends of one prompt."""
    for _ in range(2):
        found = echoed(server, tokens, max_tokens=max_tokens, stream=stream)
        n = len(found["tokens"]) - len(tokens)
        assert 0 <= n <= max_tokens
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        given = found["token_logprobs"][1 : len(tokens)]
        of_tokens = [row[token] for row, token in zip(expected, tokens[1:], strict=True)]
        assert np.abs(np.subtract(given, of_tokens)).max() < LEVEL
        assert found["text"].startswith(TEXT)
        for text, offset in zip(found["tokens"][1:], found["text_offset"][1:], strict=True):
            assert found["text"][offset:].startswith(text) or text.startswith("bytes:") or text[0] == "<"


def test_offsets_count_characters_however_their_bytes_are_split(server: Server) -> None:
    text = "Ærø 日本 🦔 end"
    n = len(server.post("/tokenize", {"content": text, "add_special": True})["tokens"])
    found = echoed(server, text, logprobs=20)
    assert found["text"].startswith(text)
    assert n > len(text), "bytes of characters are tokens of their own"
    assert found["text_offset"] == sorted(found["text_offset"])
    assert found["text_offset"][n - 1] == len(text) - len(found["tokens"][n - 1])
    assert any(each.startswith("bytes:") for each in found["tokens"])
    assert all(len(top) == 20 for top in found["top_logprobs"][1:]), "tokens of one text are told apart"


def test_several_choices_echo_the_same(server: Server, tokens: list[int]) -> None:
    body = {"prompt": tokens[:40], "echo": True, "logprobs": 0, "max_tokens": 2, "n": 3, "temperature": 1}
    choices = server.post("/v1/completions", body)["choices"]
    first, *others = [choice["logprobs"]["token_logprobs"][:40] for choice in choices]
    assert others == [first, first]


def test_the_token_that_ends_the_answer_is_told_after_an_echo(server: Server, tokens: list[int]) -> None:
    """lm-evaluation-harness leaves the last token out, which it takes for the answer's."""
    with Llama(model_path(), kv="f16", n_ctx=64, verbose=False) as llm:
        end = llm.token_eos()
    found = echoed(server, tokens, logit_bias={str(end): 100})
    assert len(found["tokens"]) == len(tokens) + 1
    assert found["token_logprobs"][-1] < 0
    assert found["text_offset"][-1] == len(found["text"])


MANY = [[65 + i % 100 for i in range(2000)]] * 16
TOO_LARGE: dict[str, dict[str, Any]] = {
    "prompt_logprobs": {"prompt": MANY, "prompt_logprobs": 20},
    "echo": {"prompt": "x " * 600_000, "n": 64, "echo": True, "overflow": "slide"},
    "max_tokens": {"prompt": ["x"] * 64, "n": 2, "max_tokens": 2000, "logprobs": 20},
}


@pytest.mark.parametrize("field", TOO_LARGE)
def test_an_answer_is_counted_before_it_is_made(server: Server, field: str) -> None:
    status, answer, _ = server.request("POST", "/v1/completions", {"max_tokens": 1, **TOO_LARGE[field]})
    assert (status, answer["error"]["param"]) == (400, field), answer
    assert "this server gives 64000000 at a time" in answer["error"]["message"]


def test_one_answer_may_have_the_log_probabilities_of_a_whole_context(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 2000, "logprobs": 20, "stop": [" "]}
    assert server.status("POST", "/v1/completions", body) == 200
