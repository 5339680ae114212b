"""What is missing between two texts: /infill, and `suffix` of completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.engine.chat.tokenizer import Tokenizer
from support.models.fim import write_fim_model
from support.servers.server import Server, running

pytestmark = pytest.mark.full

SPECIALS = ("<|user|>", "<|end|>", "<|assistant|>")
BODY = {"input_prefix": "The code of the mill is ", "input_suffix": " and no other.", "temperature": 0}


def ids(llm: Llama, text: str) -> list[int]:
    return llm.tokenize(text.encode(), add_bos=False, special=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Llama(model_path(), vocab_only=True, verbose=False) as llm:
        before, after, missing = (ids(llm, name)[0] for name in SPECIALS)
    path = write_fim_model(tmp_path_factory.mktemp("fim") / "fim.gguf", (before, after, missing))
    with running("-m", str(path), "--n-ctx", "1024") as server:
        yield server


def test_tokens_are_in_their_order(tmp_path: Any) -> None:
    with Llama(model_path(), vocab_only=True, verbose=False) as llm:
        before, after, missing = (ids(llm, name)[0] for name in SPECIALS)
    path = write_fim_model(tmp_path / "fim.gguf", (before, after, missing))
    with Llama(path, n_ctx=256, verbose=False) as llm:
        tokens = Tokenizer(llm).infill("The mill", "is old.", beginning=" of")
        start = Tokenizer(llm).tokenize("")
        parts = [before, *ids(llm, "The mill"), after, *ids(llm, "is old."), missing, *ids(llm, " of")]
        assert tokens == [*start, *parts]
        snippet = ids(llm, "\n\n--- snippet ---\n\n")
        others = Tokenizer(llm).infill("a", "b", files=[("name", "text")])
        assert others == [*start, *snippet, *ids(llm, "text"), *Tokenizer(llm).infill("a", "b")[len(start) :]]


def test_what_is_next_to_the_gap_stays(tmp_path: Any) -> None:
    with Llama(model_path(), vocab_only=True, verbose=False) as llm:
        specials = [ids(llm, name)[0] for name in SPECIALS]
    path = write_fim_model(tmp_path / "fim.gguf", (specials[0], specials[1], specials[2]))
    with Llama(path, n_ctx=256, verbose=False) as llm:
        tokenizer = Tokenizer(llm)
        one = len(tokenizer.tokenize("The mill is old. ", start=False))
        before, after = ("The mill is old. " * n for n in (300, 200))
        for room in (40, 100, 255):
            tokens = tokenizer.infill(before, after, files=[("a", before)], room=room)
            assert len(tokens) == room
            n_last = tokens.index(specials[2]) - tokens.index(specials[1]) - 1
            n_first = tokens.index(specials[1]) - tokens.index(specials[0]) - 1
            assert abs(n_first - 3 * n_last) <= 3
        short = tokenizer.infill("The mill", after, beginning=" x", files=[("a", before)], room=200)
        assert len(short) == 200
        assert short.index(specials[0]) <= 1  # the texts take all the room
        alone = tokenizer.infill("The mill", "is old.", files=[("a", before)], room=200)
        assert len(alone) == 200
        assert alone.index(specials[0]) > 100
        assert one < 20


def test_infill_whole_and_as_a_stream(server: Server) -> None:
    whole = server.post("/infill", {**BODY, "n_predict": 6})
    assert (whole["stop"], whole["tokens_predicted"]) == (True, 6)
    assert whole["stop_type"] == "limit"
    chunks = server.events("/infill", {**BODY, "n_predict": 6})
    assert "".join(chunk["content"] for chunk in chunks) == whole["content"]
    assert [chunk["stop"] for chunk in chunks[:-1]] == [False] * (len(chunks) - 1)
    assert chunks[-1]["stop"]


def test_a_suffix_is_the_same(server: Server) -> None:
    whole = server.post("/infill", {**BODY, "n_predict": 6})["content"]
    body = {"prompt": BODY["input_prefix"], "suffix": BODY["input_suffix"], "max_tokens": 6, "temperature": 0}
    assert server.post("/v1/completions", body)["choices"][0]["text"] == whole


LLAMA_VIM = {  # what autoload/llama.vim sends
    "id_slot": 0,
    "input_prefix": "def add(a, b):\n",
    "input_suffix": "\n\nprint(add(1, 2))\n",
    "input_extra": [{"text": "x = 1\n", "time": 1, "filename": "a.py"}],
    "prompt": "    ",
    "n_predict": 16,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.9,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": ["content", "timings/prompt_n", "truncated", "tokens_cached"],
}


def test_llama_vim(server: Server) -> None:
    status, answer, headers = server.request("POST", "/infill", LLAMA_VIM)
    assert (status, answer.keys() - {"warnings"}) == (200, set(LLAMA_VIM["response_fields"]))  # type: ignore[arg-type]
    ignored = {"id_slot", "input_extra[].time", "t_max_prompt_ms"}
    assert set(headers["x-ignored-fields"].split(", ")) == ignored
    nothing = {"input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "samplers": []}
    warm = {**LLAMA_VIM, **nothing, "temperature": 0.0, "t_max_predict_ms": 1, "response_fields": [""]}
    assert server.post("/infill", warm).keys() <= {"warnings"}
    long = server.post("/infill", {**LLAMA_VIM, "input_prefix": "x = 1\n" * 900, "response_fields": []})
    assert 0 < long["tokens_predicted"] <= 16
    assert long["tokens_evaluated"] > 900


@pytest.mark.nightly
def test_a_model_without_tokens_for_it_says_so() -> None:
    with running("--n-ctx", "512") as server:
        status, answer, _ = server.request("POST", "/infill", BODY)
        assert status == 400
        assert "FIM" in answer["error"]["message"]
        body = {"prompt": "a", "suffix": "b"}
        status, answer, _ = server.request("POST", "/v1/completions", body)
        assert (status, answer["error"]["param"]) == (400, "suffix")
