"""A chat evaluates what is new of it, whatever happens to ids and history, and answers as if never left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import llama_cpp
import pytest

from mixedkv import Llama
from mixedkv.engine import PromptCache
from mixedkv.store import KVStore
from support import TESTS
from support.engine.conversations import (
    GREEDY,
    QUESTIONS,
    RECALL,
    cold,
    converse,
    empty,
    journal,
    n_tokens,
    open_llama,
    rendered,
    user,
)
from support.patience import PATIENCE

pytestmark = pytest.mark.core

# --- what is evaluated ---


def test_ten_turns_evaluate_the_new_message_only(llm: Llama, cache: PromptCache) -> None:
    messages = [journal()]
    for i in range(10):
        result = cache.chat(messages, **GREEDY)
        usage = result
        assert usage.prompt_tokens == 1 + n_tokens(llm, rendered(messages))  # with BOS
        assert usage.cached + usage.evaluated == usage.prompt_tokens
        if i:  # "<|end|>" of the answer before, the new message, "<|assistant|>"
            new = "<|end|>" + rendered(messages[-1:])
            assert usage.evaluated == n_tokens(llm, new)
            assert usage.evaluated < 0.2 * usage.prompt_tokens
            assert (usage.tier, usage.exact) == ("context", True)
            assert usage.matched_message_id == messages[-2]["message_id"]
        assert usage.stored == llm.n_tokens - usage.cached
        messages += [result.message, user(QUESTIONS[i % len(QUESTIONS)])]


@pytest.mark.parametrize("kv", ["f16", "q8_0", "q4_0", "mixed"])
def test_restored_turns_answer_as_those_that_never_left(kv: str) -> None:
    with open_llama(kv) as llm, KVStore(None) as one, KVStore(None) as two:
        _, live = converse(PromptCache(llm, one), 6)
        empty(llm)
        _, restored = converse(PromptCache(llm, two), 6, before_turn=lambda: empty(llm))
    assert [result.tier for result in restored] == [""] + ["ram"] * 5
    assert [result.text for result in restored] == [result.text for result in live]
    for left, stayed in zip(restored, live, strict=True):
        assert left.evaluated == stayed.evaluated
        assert left.exact


def test_answers_are_those_of_the_plain_llama(llm: Llama) -> None:
    """Sampling, stop strings, grammars and tools are llama-cpp-python's own."""
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "Q" [a-c]+ "."', verbose=False)
    for options in (
        GREEDY,
        {"temperature": 0.9, "seed": 7, "max_tokens": 12},
        {"temperature": 1.5, "top_k": 5, "seed": 8, "repeat_penalty": 1.3, "max_tokens": 12},
        {**GREEDY, "stop": ["noted"]},
        {**GREEDY, "stop": "th"},
        {**GREEDY, "max_tokens": 3},
        {**GREEDY, "grammar": grammar},
        {**GREEDY, "logit_bias": {str(llm.tokenize(b"7", add_bos=False)[0]): 50.0}},
    ):
        for messages in ([journal()], RECALL.messages):
            empty(llm)
            plain = llm.create_chat_completion(messages, **options)  # type: ignore[arg-type]
            empty(llm)
            with KVStore(None) as store:
                result = PromptCache(llm, store).chat(messages, **options)
            assert result.text == plain["choices"][0]["message"]["content"]
            assert result.finish_reason == plain["choices"][0]["finish_reason"]
            assert result.completion_tokens == plain["usage"]["completion_tokens"]
            assert result.prompt_tokens == plain["usage"]["prompt_tokens"]


def test_what_is_live_beyond_the_answer_does_not_matter(llm: Llama, cache: PromptCache) -> None:
    """A stop string leaves tokens in the cache that are in no message."""
    first = cache.chat([journal()], **{**GREEDY, "stop": [" noted that"]})
    assert first.text == "I have"
    assert llm.n_tokens > first.prompt_tokens + n_tokens(llm, "I have")
    messages = [journal(), first.message, user(RECALL.fact.question)]
    second = cache.chat(messages, **GREEDY)
    assert second.cached == first.prompt_tokens + n_tokens(llm, "I have")
    plain = cold(llm, messages)
    assert second.text == plain


@pytest.mark.parametrize("kv", ["mixed", "q8_0"])
def test_answering_once_more_is_exact(kv: str) -> None:
    """Wherever the prompt ends in a group: its rows are stored as they are before anything is generated."""
    with open_llama(kv) as llm:
        for n in range(1, 40):
            with KVStore(None) as store:
                cache = PromptCache(llm, store)
                messages = [
                    journal(),
                    {"role": "assistant", "content": "ab " * n},
                    user(RECALL.fact.question),
                ]
                first = cache.chat(messages, **{**GREEDY, "max_tokens": 40})
                again = cache.chat(messages, **{**GREEDY, "max_tokens": 40})
            assert (again.evaluated, again.exact) == (1, True)
            assert again.text == first.text


# --- a history that changes ---


def test_an_edited_message_costs_from_there(llm: Llama, cache: PromptCache) -> None:
    messages, _ = converse(cache, 4)
    same = rendered(messages[:2]).removesuffix("<|assistant|>") + "<|user|>"
    edited = [*messages[:2], {**messages[2], "content": "Zita?"}, *messages[3:]]
    for prepare in (lambda: None, lambda: empty(llm)):
        prepare()
        result = cache.chat(edited, **GREEDY)
        assert result.cached >= n_tokens(llm, same)
        assert result.evaluated <= n_tokens(llm, rendered(edited[2:])) + 1
    assert result.text == cold(llm, edited)


def test_a_deleted_message_costs_from_there(llm: Llama, cache: PromptCache) -> None:
    messages, _ = converse(cache, 4)
    deleted = messages[:3] + messages[5:]
    result = cache.chat(deleted, **GREEDY)
    assert n_tokens(llm, rendered(messages[:3])) - 1 <= result.cached
    assert result.cached < n_tokens(llm, rendered(messages[:5]))
    assert result.text == cold(llm, deleted)


def test_reordered_messages_are_another_conversation(llm: Llama, cache: PromptCache) -> None:
    messages, _ = converse(cache, 3)
    reordered = [*messages[2:4], *messages[:2], *messages[4:]]
    result = cache.chat(reordered, **GREEDY)
    assert result.cached < 20
    assert result.text == cold(llm, reordered)


def test_a_branch_and_back(llm: Llama, cache: PromptCache) -> None:
    """Both ends of a conversation stay stored: going back costs one message."""
    messages, _ = converse(cache, 4)
    cache.chat(messages, **GREEDY)
    branch = [*messages[:3], {"role": "assistant", "content": "Ask me later."}, user("Now?")]
    cache.chat(branch, **GREEDY)
    back = cache.chat(messages, **GREEDY)
    assert back.evaluated == 1  # everything is there; sampling needs the last logits
    assert back.tier == "ram"


def test_an_unchanged_prompt_evaluates_one_token(llm: Llama, cache: PromptCache) -> None:
    first = cache.chat([journal()], **GREEDY)
    again = cache.chat([journal()], **GREEDY)
    assert again.evaluated == 1
    assert again.text == first.text


# --- streaming ---


def test_streaming_gives_the_same_in_chunks(llm: Llama, cache: PromptCache) -> None:
    messages = [journal(), {"role": "assistant", "content": "I have noted that."}, user(RECALL.fact.question)]
    whole = cache.chat(messages, **GREEDY)
    empty(llm)
    plain = list(llm.create_chat_completion(messages, stream=True, **GREEDY))  # type: ignore[arg-type]
    stream = cache.stream(messages, message_id="m-1", **GREEDY)
    chunks = list(stream)
    assert [c["choices"][0]["delta"].get("content") for c in chunks] == [
        c["choices"][0]["delta"].get("content") for c in plain
    ]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "message_id": "m-1"}
    assert stream.result is not None
    assert stream.result.text == whole.text == RECALL.fact.answer
    assert stream.result.finish_reason == "stop"
    assert stream.result.message_id == "m-1"


def test_a_stream_closed_early_keeps_what_was_computed(llm: Llama, cache: PromptCache) -> None:
    stream = cache.stream([journal()], **GREEDY)
    for _ in range(4):
        next(stream)
    assert stream.result is None
    stream.close()
    assert stream.result is not None
    assert 0 < len(stream.result.text) < len("I have noted that.")
    empty(llm)
    result = cache.chat([journal(), stream.result.message, user("Go on.")], **GREEDY)
    assert result.tier == "ram"
    assert result.cached >= stream.result.prompt_tokens


def test_tool_calls(llm: Llama, cache: PromptCache) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [4]}}, "required": ["n"]}
    tool = {"type": "function", "function": {"name": "count", "parameters": schema}}
    options = {
        **GREEDY,
        "max_tokens": 100,
        "tools": [tool],
        "tool_choice": {"type": "function", "function": {"name": "count"}},
    }
    whole = cache.chat([journal()], **options)
    stream = cache.stream([journal()], **options)
    list(stream)
    assert stream.result is not None
    for result in (whole, stream.result):
        (call,) = result.message["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("count", {"n": 4})
        assert result.finish_reason == "tool_calls"


# --- restart ---

_CHILD = """
import json, sys
import mixedkv  # before llama_cpp
sys.path.insert(0, sys.argv[1])
from support.engine import conversations as t
from mixedkv.engine import PromptCache
from mixedkv.store import KVStore

folder, n_done, messages = sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
with t.open_llama(sys.argv[5]) as llm, KVStore(folder) as store:
    cache = PromptCache(llm, store)
    for question in t.QUESTIONS[n_done : n_done + 3]:
        result = cache.chat(messages, **t.GREEDY)
        messages += [result.message, t.user(question)]
        used = [result.tier, result.evaluated, result.matched_message_id]
        print(json.dumps([result.message, *used]))
"""


@pytest.mark.parametrize("kv", ["mixed", "f16"])
def test_a_new_process_goes_on_from_the_store(kv: str, tmp_path: Path) -> None:
    with open_llama(kv) as llm, KVStore(None) as other:
        _, stayed = converse(PromptCache(llm, other), 6)
    messages, answers = [journal()], []
    for n_done in (0, 3):
        arguments = [str(TESTS), str(tmp_path), str(n_done), json.dumps(messages), kv]
        command = [sys.executable, "-c", _CHILD, *arguments]
        out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=PATIENCE).stdout
        for i, line in enumerate(out.splitlines()):
            message, source, n_evaluated, matched = json.loads(line)
            if n_done and not i:
                assert source == "disk"
                assert matched == messages[-2]["message_id"]
            assert n_evaluated == stayed[n_done + i].evaluated
            messages += [message, user(QUESTIONS[n_done + i])]
            answers.append(message["content"])
    assert answers == [result.text for result in stayed]
