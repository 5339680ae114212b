"""A conversation longer than its context goes on, and what is left of it is not taken for a plain prompt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.bundled.corpus import make_recall
from mixedkv.engine import Generation, PromptCache
from mixedkv.prompts.overflow import budget, head_of
from mixedkv.store import Identity, KVStore
from mixedkv.tokens import common_prefix
from support.engine.conversations import Message, empty, user

pytestmark = pytest.mark.full

SIZE = 448
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16}


@pytest.fixture(scope="module", params=["mixed", pytest.param("f16", marks=pytest.mark.nightly)])
def shared(request: pytest.FixtureRequest) -> Iterator[Llama]:
    options = {"n_ctx": SIZE, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    with Llama(model_path(), kv=request.param, **options) as llm:
        yield llm


def note(i: int, n_sentences: int = 4) -> Message:
    return user(" ".join(make_recall(62_000 + i, n_sentences).journal))


def converse(
    cache: PromptCache, n_turns: int, messages: list[Message]
) -> list[tuple[list[Message], Generation]]:
    turns = []
    for i in range(n_turns):
        messages.append(note(i))
        result = cache.chat(messages, **GREEDY)
        turns.append((list(messages), result))
        messages.append(result.message)
    return turns


def head(cache: PromptCache, messages: list[Message]) -> int:
    """How many first tokens stay: the first message."""
    tokens = np.array(cache.engine.tokenizer.encode(messages[:2], long=True)[0], np.int32)
    return head_of(cache.engine.tokenizer.message_starts(tokens), SIZE)


def n_same(cache: PromptCache, messages: list[Message], held: Any) -> int:
    """How many first tokens of the whole chat are those that are held; the next message may begin alike."""
    whole = np.array(cache.engine.tokenizer.encode(messages, long=True)[0], np.int32)
    return common_prefix(whole, np.array(held, np.int32))


def n_tokens(llm: Llama, messages: list[Message]) -> int:
    text = "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages) + "<|assistant|>"
    return len(llm.tokenize(text.encode(), add_bos=False, special=True))


# --- dropping ---


def test_tokens_in_the_middle_are_dropped_and_the_rest_moves_up(llm: Llama) -> None:
    tokens = llm.tokenize(note(0, 20)["content"].encode())
    llm.eval(tokens)
    values = llm.kv.layer(3).v()
    llm.kv.remove_and_shift(0, 8, 40)
    kept = [*range(8), *range(40, len(tokens))]
    assert llm.input_ids[: llm.n_tokens].tolist() == [tokens[i] for i in kept]
    llm.eval([tokens[0]])
    assert llm.kv.layer(3).positions().tolist() == list(range(len(kept) + 1))
    hot = llm.kv.layer(3).hot()[:-1]
    same = llm.kv.layer(3).v()[:-1]  # V does not turn with the position
    still = hot | (llm.kv.stats().kv == "f16")
    assert still.any()
    assert np.array_equal(same[still], values[kept][still])


@pytest.mark.parametrize(("begin", "end"), [(-1, 4), (4, 4), (5, 4)])
def test_ranges_that_are_none(llm: Llama, begin: int, end: int) -> None:
    with pytest.raises(ValueError, match="not a valid range"):
        llm.kv.remove_and_shift(0, begin, end)


# --- long chats ---


def test_a_long_chat_goes_on(llm: Llama, store: KVStore, caplog: pytest.LogCaptureFixture) -> None:
    cache = PromptCache(llm, store, overflow="slide")
    messages: list[Message] = []
    with caplog.at_level(logging.WARNING, "mixedkv.engine"):
        turns = converse(cache, 14, messages)
    usages = [result for _, result in turns]
    assert usages[-1].prompt_tokens > SIZE + 200
    assert llm.n_tokens <= SIZE
    for (asked, _), usage in list(zip(turns, usages, strict=True))[1:]:
        assert usage.prompt_tokens == 1 + n_tokens(llm, asked)  # with BOS
        assert usage.evaluated <= n_tokens(llm, asked[-1:]) + 2
        assert usage.prompt_tokens - usage.dropped <= usage.cached + usage.evaluated <= usage.prompt_tokens
        assert usage.exact == (usage.dropped == 0)
    dropped = [usage.dropped for usage in usages]
    assert dropped[0] == 0
    assert dropped == sorted(dropped)
    grown = [n for n in np.diff(dropped) if n]
    at_once = (SIZE - head(cache, messages)) // 4
    assert min(grown) >= at_once
    # a message goes as a whole, and what the new one is too long goes too
    assert max(grown) < at_once + 2 * n_tokens(llm, messages[-2:])
    records = [record for record in caplog.records if "is full" in record.message]
    assert len(records) == len(grown)
    assert all(word not in caplog.text for word in messages[0]["content"].split() if len(word) > 5)


def test_what_is_recent_is_still_known(llm: Llama, store: KVStore) -> None:
    cache = PromptCache(llm, store, overflow="slide")
    messages: list[Message] = []
    converse(cache, 10, messages)
    recall = make_recall(62_100, 6)
    last = recall.messages
    messages += [last[0]]
    messages += [cache.chat(messages, **GREEDY).message, last[2]]
    result = cache.chat(messages, **GREEDY)
    assert result.dropped > 0
    assert result.text == recall.fact.answer


def test_a_shifted_sequence_is_stored_and_reused_as_nothing_else(llm: Llama, store: KVStore) -> None:
    cache = PromptCache(llm, store, overflow="slide")
    messages: list[Message] = []
    turns = converse(cache, 12, messages)
    n_head = head(cache, messages)
    first = next(i for i, (_, result) in enumerate(turns) if result.dropped)
    assert all(result.stored == 0 for _, result in turns[first + 1 :])
    assert max(entry.p1 for entry in store.entries()) <= SIZE
    held = llm.input_ids[: llm.n_tokens].tolist()
    assert llm.kv.exact_tokens == n_head
    store.save(llm)
    match = store.find(Identity.of(llm), held)
    assert match is None or match.n_tokens <= n_same(cache, messages, held)
    # Read as a plain prompt, only the first tokens of it are what they seem.
    read = cache.generate(held[:200], max_tokens=1, reuse="prefix")
    assert read.cached <= n_same(cache, messages, held)


def test_two_caches_on_one_llama_know_of_the_shift(llm: Llama, store: KVStore) -> None:
    """The second goes on with a prompt that reads like what the first has left."""
    converse(PromptCache(llm, store, overflow="slide"), 12, [])
    with KVStore(None) as other:
        second = PromptCache(llm, other)
        short = [note(50)]
        answer = second.chat(short, **GREEDY)
        assert answer.cached == 0
        empty(llm)
        with KVStore(None) as third:
            assert PromptCache(llm, third).chat(short, **GREEDY).text == answer.text


def test_another_tenant_does_not_go_on_with_a_shifted_sequence(llm: Llama, store: KVStore) -> None:
    messages: list[Message] = []
    converse(PromptCache(llm, store, tenant="ada", overflow="slide"), 12, messages)
    messages.append(note(90))
    cache = PromptCache(llm, store, tenant="bo", overflow="slide")
    assert cache.chat(messages, **GREEDY).cached == 0


def test_a_long_chat_in_another_process_begins_with_what_fits(llm: Llama, store: KVStore) -> None:
    messages: list[Message] = []
    converse(PromptCache(llm, store, overflow="slide"), 16, messages)
    empty(llm)
    with KVStore(None) as other:
        cache = PromptCache(llm, other, overflow="slide")
        messages.append(note(90))
        usage = cache.chat(messages, **GREEDY)
        n_head = head(cache, messages)
        left = budget(SIZE, n_head)
        assert left - 60 < usage.evaluated <= left < SIZE
        assert usage.dropped >= usage.prompt_tokens - left
        assert not usage.exact
        match = other.find(Identity.of(llm), cache.engine.tokenizer.encode(messages, long=True)[0])
        assert match is None or match.n_tokens <= n_same(cache, messages, llm.input_ids[: llm.n_tokens])
        # from here on it goes on as any other
        messages += [{"role": "assistant", "content": "I have noted that."}, note(91)]
        assert cache.chat(messages, **GREEDY).evaluated < 0.3 * left


def test_a_message_longer_than_the_context(llm: Llama, store: KVStore) -> None:
    cache = PromptCache(llm, store, overflow="slide")
    messages = [note(0)]
    messages += [cache.chat(messages, **GREEDY).message, note(1, 120)]
    result = cache.chat(messages, **GREEDY)
    assert result.prompt_tokens > 2 * SIZE
    assert result.evaluated <= SIZE
    assert result.text == "I have noted that."


def test_generation_goes_on_beyond_the_context(
    llm: Llama, store: KVStore, caplog: pytest.LogCaptureFixture
) -> None:
    cache = PromptCache(llm, store, overflow="slide")
    on = {"temperature": 0.0, "logit_bias": {str(llm.token_eos()): -1e9}}
    with caplog.at_level(logging.WARNING, "mixedkv.engine"):
        result = cache.chat([note(0)], max_tokens=SIZE + 50, **on)
    assert result.finish_reason == "length"
    assert result.completion_tokens == SIZE + 50
    assert result.dropped > 0
    assert "is full" in caplog.text
    n = result.prompt_tokens  # the plain prefix, stored before anything was dropped
    assert sorted((entry.p0, entry.p1) for entry in store.entries()) == [(0, n), (n, SIZE - 2)]
    following = cache.chat([note(0), result.message, note(1)], **GREEDY)
    assert following.evaluated < SIZE


def test_without_max_tokens_generation_ends(llm: Llama, store: KVStore) -> None:
    on = {"temperature": 0.0, "logit_bias": {str(llm.token_eos()): -1e9}}
    result = PromptCache(llm, store).chat([note(0)], **on)
    assert result.prompt_tokens + result.completion_tokens == SIZE


# --- where nothing can be dropped ---


def test_without_sinks_a_long_prompt_is_refused(llm: Llama, store: KVStore) -> None:
    cache = PromptCache(llm, store, overflow="refuse")
    with pytest.raises(ValueError, match="exceeds the available context size"):
        cache.chat([note(0, 60)], **GREEDY)
    on = {"temperature": 0.0, "logit_bias": {str(llm.token_eos()): -1e9}}
    result = cache.chat([note(0)], max_tokens=10_000, **on)
    assert result.prompt_tokens + result.completion_tokens == SIZE
    assert result.dropped == 0


def test_memories_that_cannot_shift_evaluate_what_is_left(zoo_path: Callable[[str], Path]) -> None:
    options = {"kv": "f16", "n_ctx": 512, "n_ubatch": 64, "chat_format": "chatml", "verbose": False}
    messages = [user("ab " * 300)]
    for swa_full in (False, True):
        with Llama(zoo_path("gemma2"), swa_full=swa_full, **options) as llm, KVStore(None) as other:
            assert llm.kv.can_shift is swa_full
            result = PromptCache(llm, other, overflow="slide").chat(messages, **GREEDY)
            assert result.dropped > 0
            assert not result.exact


@pytest.mark.parametrize("overflow", ["slides", 4, None])
def test_bad_ways_of_overflow(llm: Llama, overflow: Any) -> None:
    with pytest.raises(ValueError, match=r"overflow=.*refuse, slide"):
        PromptCache(llm, overflow=overflow)
