"""Options of a chat: what holds, what is refused and by which words, and what stops an answer."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import llama_cpp
import pytest

from mixedkv import Llama
from mixedkv.engine import PromptCache
from mixedkv.errors import StoppedError, UnsupportedModelError
from mixedkv.store import KVStore
from support.engine.conversations import GREEDY, RECALL, empty, journal, open_llama, user

pytestmark = pytest.mark.full

# --- what holds ---


@pytest.mark.parametrize("asked", ["json_schema", "json_object", "grammar"])
def test_an_answer_is_held_to_a_format(cache: PromptCache, asked: str) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [4, 17]}}, "required": ["n"]}
    options: dict[str, Any] = {
        "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        "json_object": {"response_format": {"type": "json_object", "schema": schema}},
        "grammar": {"grammar": 'root ::= "{\\"n\\": 4}"'},
    }[asked]
    result = cache.chat([journal()], temperature=0.0, max_tokens=60, **options)
    assert json.loads(result.text)["n"] in (4, 17)
    assert result.finish_reason == "stop"


def test_log_probabilities_are_of_the_answers_tokens(cache: PromptCache) -> None:
    result = cache.chat([journal()], logprobs=True, top_logprobs=3, **GREEDY)
    tokens = [each.token for each in result.logprobs]
    assert tokens == list(result.tokens[: len(tokens)])
    assert len(tokens) >= result.completion_tokens - 1
    assert all(each.logprob == each.top["logprob"][0] for each in result.logprobs)  # the likeliest each time
    assert all(len(each.top) == 3 for each in result.logprobs)


def test_parts_of_a_content_are_one_text(cache: PromptCache) -> None:
    text = journal()["content"]
    parts = [{"type": "text", "text": text[:100]}, {"type": "text", "text": text[100:]}]
    whole = cache.chat([journal()], **GREEDY)
    again = cache.chat([{"role": "user", "content": parts}], **GREEDY)
    assert (again.text, again.evaluated) == (whole.text, 1)
    with pytest.raises(ValueError, match=r"messages\[0\]\.content.*images"):
        cache.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_seeds_choose_the_answer(cache: PromptCache) -> None:
    warm: dict[str, Any] = {"max_tokens": 12, "temperature": 3.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    one, same, other = (cache.chat([journal()], seed=seed, **warm).text for seed in (3, 3, 4))
    assert one == same != other


def test_how_far_a_prompt_is(llm: Llama, store: KVStore) -> None:
    stream = PromptCache(llm, store).stream([journal()], **GREEDY)
    done, total = stream.evaluated
    assert (done, total) == (0, total)
    next(stream)
    assert stream.evaluated == (total, total)
    stream.close()


def test_batches_of_a_plain_llama_come_one_by_one(cache: PromptCache) -> None:
    answers = cache.generate_batch(["The mill", "A kite", "The mill"], **GREEDY)
    assert [answer.text for answer in answers] == [
        cache.generate(text, reuse=False, **GREEDY).text for text in ("The mill", "A kite", "The mill")
    ]


# --- what is refused ---


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("logits_processor", llama_cpp.LogitsProcessorList([]), "llm.create_chat_completion"),
        ("stopping_criteria", llama_cpp.StoppingCriteriaList([]), "llm.create_chat_completion"),
        ("functions", [], "use tools"),
        ("function_call", "auto", "use tool_choice"),
        ("stream", True, "stream for its chunks"),
        ("tfs_z", 1.0, "leave it out"),
        ("model", "m", "leave it out"),
        ("temprature", 0.5, "temperature"),
    ],
)
def test_options_that_are_not_there(cache: PromptCache, option: str, value: object, remedy: str) -> None:
    with pytest.raises(TypeError, match=f"{option}.*{re.escape(remedy)}"):
        cache.chat([journal()], **{option: value})


def test_wrong_values_are_refused_by_name(cache: PromptCache) -> None:
    tool = {"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}
    schema = {"type": "json_object"}
    for options, match in (
        ({"response_format": {"type": "xml"}}, "response_format: type='xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format: there is no schema"),
        ({"response_format": schema, "grammar": 'root ::= "a"'}, "give one of them"),
        ({"response_format": schema, "tools": [tool]}, "response_format and tools"),
        ({"tool_choice": "required"}, "there are no tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "sum"}}, "tools": [tool]},
            "no tool 'sum'",
        ),
        ({"tools": [{"name": "count"}]}, "tools: "),
        ({"temperature": -1}, "temperature=-1"),
        ({"top_p": 2.0}, "top_p=2.0"),
    ):
        with pytest.raises(ValueError, match=match):
            cache.chat([journal()], **options)  # type: ignore[arg-type]
    for options, match in (
        ({"logit_bias": [1]}, "logit_bias"),
        ({"grammar": 7}, "grammar=7"),
        ({"max_tokens": "many"}, "max_tokens='many'"),
        ({"seed": 1.5}, "seed=1.5"),
    ):
        with pytest.raises(TypeError, match=match):
            cache.chat([journal()], **options)


def test_a_chat_handler_answers_its_own_chats(store: KVStore) -> None:
    def handler(**_: object) -> None: ...

    with open_llama() as llm:
        cache = PromptCache(llm, store)
        llm.chat_handler = handler  # type: ignore[assignment]
        with pytest.raises(UnsupportedModelError, match="create_chat_completion"):
            cache.chat([journal()])


# --- what ends an answer ---


def _after(stream: Any, n: int, function: Callable[[], object]) -> None:
    def wait() -> None:
        while stream.evaluated[0] < n:
            time.sleep(0.001)
        function()

    threading.Thread(target=wait, daemon=True).start()


def test_ctrl_c_in_a_prompt_keeps_what_was_evaluated(store: KVStore) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with open_llama(n_ctx=4096, n_batch=128, n_ubatch=128) as llm:
            cache, long = PromptCache(llm, store), [user(" ".join(RECALL.journal * 4))]
            stream = cache.stream(long, **GREEDY)
            _after(stream, 256, lambda: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                list(stream)
            assert stream.result is not None
            assert stream.result.text == ""
            n = llm.n_tokens
            assert n >= 256
            result = cache.chat(long, **GREEDY)
            assert result.exact
            assert result.cached >= n
            empty(llm)
            assert PromptCache(llm).chat(long, **GREEDY).text == result.text
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_a_stream_and_keeps_its_text(llm: Llama, cache: PromptCache) -> None:
    stream = cache.stream([journal()], **GREEDY)
    chunks = [next(stream) for _ in range(4)]
    llm.interrupt()
    with pytest.raises(StoppedError):
        list(stream)
    said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert stream.result is not None
    assert stream.result.text.startswith(said)
    assert llm.n_tokens >= stream.result.prompt_tokens
    assert cache.chat([journal()], **GREEDY).evaluated == 1
