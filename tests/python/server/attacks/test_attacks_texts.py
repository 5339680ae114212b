"""Names, values and texts that are traps."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator

import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.engine.chat.tokenizer import Tokenizer
from support.servers.server import MODEL, Server

pytestmark = pytest.mark.nightly

# --- names and values that are traps ---


@pytest.mark.parametrize(
    "call",
    [
        '{"a": "%s"}' % ("x" * 200_000),
        '{"a": "\\ud800"}',
        '{"a": %s}' % ("[" * 230 + "]" * 230),
        '{"a": %s}' % ("[" * 900 + "]" * 900),
    ],
)
def test_a_context_that_cannot_be_written_down_is_refused(server: Server, call: str) -> None:
    body = f'{{"model": "{MODEL}", "messages": [{{"role": "assistant", "tool_calls": [{call}]}}]}}'
    status, answer, _ = server.request("POST", "/v1/context", raw=body.encode())
    assert (status, answer["error"]["param"]) == (400, "messages"), answer
    assert all(seq["state"] != "kept" for seq in server.stats()["sequences"])


def test_a_long_name_of_a_field_is_not_repeated(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 1, "a" * 100_000: 1}
    status, answer, _ = server.request("POST", "/v1/completions", body)
    assert status == 200
    assert len(json.dumps(answer)) < 2000
    assert "a" * 1000 not in server.log


# --- texts that are traps ---


@pytest.fixture(scope="module")
def language() -> Iterator[Tokenizer]:
    llm = Llama(model_path(), n_ctx=256, n_threads=1, verbose=False)
    yield Tokenizer(llm)
    llm.close()


def test_a_text_in_chunks_has_the_tokens_of_the_whole(
    language: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    special = [language._token_text(token) for token in range(language.n_vocab)]
    special = [text for text in special if text.startswith("<|") and text.endswith("|>")]
    assert len(special) > 3
    r = random.Random(1)
    words = [*special, "a", "  ", "\n", "hello world", "<|", "|>", "<"]
    texts = ["".join(r.choices(words, k=50)) for _ in range(200)]
    for start in (True, False):
        whole = [language.tokenize(text, start=start, special=True) for text in texts]
        with monkeypatch.context() as patch:
            patch.setattr("mixedkv.engine.chat.text_tokenizer._CHUNK", 40)
            assert min(len(list(language._chunks(text))) for text in texts) > 1
            assert [language.tokenize(text, start=start, special=True) for text in texts] == whole


def test_many_special_tokens_take_time_by_their_number(language: Tokenizer) -> None:
    """llama.cpp alone takes half a minute for these."""

    def seconds(n: int) -> float:
        """Of this process alone, whatever else runs."""
        began = time.process_time()
        assert len(language.tokenize("<|end|>x" * n, start=False, special=True, n_ctx=4 * n)) >= 2 * n
        return time.process_time() - began

    many, few = (min(seconds(n) for _ in range(3)) for n in (20_000, 5_000))
    assert many < 10 * few
