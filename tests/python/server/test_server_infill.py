"""What is missing between two texts: /infill, and `suffix` of completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.engine.chat.tokenizer import Tokenizer
from support.fim import write_fim_model
from support.server_support import Server, running

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
        with pytest.raises(ValueError, match=r"^input_extra"):
            Tokenizer(llm).infill("a", "b", files=[("name", "text")])


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


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": ["a"], "suffix": "b"}, None),
        ("/v1/completions", {"prompt": [1, 2], "suffix": "b"}, None),
        ("/infill", {**BODY, "input_extra": [{"filename": "a", "text": "b"}]}, "input_extra"),
        ("/infill", {"input_prefix": "a"}, "input_suffix"),
        ("/infill", {**BODY, "session_id": "nobody"}, None),
    ],
)
def test_what_cannot_be_filled_is_refused(server: Server, path: str, body: Any, param: str | None) -> None:
    status, answer, _ = server.request("POST", path, body)
    assert status == 400, answer
    assert param is None or answer["error"]["param"] == param


@pytest.mark.nightly
def test_a_model_without_tokens_for_it_says_so() -> None:
    with running("--n-ctx", "512") as server:
        status, answer, _ = server.request("POST", "/infill", BODY)
        assert status == 400
        assert "FIM" in answer["error"]["message"]
        body = {"prompt": "a", "suffix": "b"}
        status, answer, _ = server.request("POST", "/v1/completions", body)
        assert (status, answer["error"]["param"]) == (400, "suffix")
