"""A chat evaluates what is new of it, whatever happens to ids and history, and answers as if never left."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.bundled.corpus import make_recall
from mixedkv.conversation import (
    CacheSessionMetadata,
    ChatResult,
    ContextCacheManager,
    CreateCacheResponse,
    CreateContextCacheRequest,
    MessageCache,
)
from mixedkv.errors import UnsupportedModelError
from mixedkv.store import KVStore

RECALL = make_recall(seed=61_001, n_sentences=30, where=0.2)
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
QUESTIONS = [make_recall(61_001, 30, where=w / 10).fact.question for w in range(9)]
Message = dict[str, Any]


def open_llama(kv: str = "mixed", **options: Any) -> Llama:
    threads = {"n_threads": 1, "n_threads_batch": 1}
    return Llama(model_path(), kv=kv, **{"n_ctx": 1024, "verbose": False, **threads, **options})


@pytest.fixture(scope="module")
def shared() -> Iterator[Llama]:
    with open_llama() as llm:
        yield llm


@pytest.fixture
def llm(shared: Llama) -> Llama:
    empty(shared)
    return shared


@pytest.fixture
def store() -> Iterator[KVStore]:
    with KVStore(None) as store:
        yield store


@pytest.fixture
def cache(llm: Llama, store: KVStore) -> Iterator[MessageCache]:
    with MessageCache(llm, store) as cache:
        yield cache


def empty(llm: Llama) -> None:
    """As in a new process: nothing is live."""
    llm._ctx.kv_cache_clear()
    llm.reset()


def user(text: str, **more: str) -> Message:
    return {"role": "user", "content": text, **more}


def journal() -> Message:
    return user(" ".join(RECALL.journal))


def converse(
    cache: MessageCache, n_turns: int, before_turn: Callable[[], None] = lambda: None
) -> tuple[list[Message], list[ChatResult]]:
    """The journal, then a question in each turn."""
    messages, results = [journal()], []
    for question in QUESTIONS[:n_turns]:
        before_turn()
        results.append(cache.chat(messages, **GREEDY))
        messages += [results[-1].message, user(question)]
    return messages, results


def n_tokens(llm: Llama, text: str) -> int:
    return len(llm.tokenize(text.encode(), add_bos=False, special=True))


def rendered(messages: list[Message]) -> str:
    return "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages) + "<|assistant|>"


# --- what is evaluated ---


def test_ten_turns_evaluate_the_new_message_only(llm: Llama, cache: MessageCache) -> None:
    messages = [journal()]
    for i in range(10):
        result = cache.chat(messages, **GREEDY)
        usage = result.usage
        assert usage.prompt_tokens == n_tokens(llm, rendered(messages))
        assert usage.cached_tokens + usage.evaluated_tokens == usage.prompt_tokens
        if i:  # "<|end|>" of the answer before, the new message, "<|assistant|>"
            new = "<|end|>" + rendered(messages[-1:])
            assert usage.evaluated_tokens == n_tokens(llm, new)
            assert usage.evaluated_tokens < 0.2 * usage.prompt_tokens
            assert (usage.source, usage.exact) == ("live", True)
            assert usage.matched_message_id == messages[-2]["message_id"]
        assert usage.stored_tokens == llm.n_tokens - usage.cached_tokens
        messages += [result.message, user(QUESTIONS[i % len(QUESTIONS)])]


@pytest.mark.parametrize("kv", ["f16", "q8_0", "q4_0", "mixed"])
def test_restored_turns_answer_as_those_that_never_left(kv: str) -> None:
    with open_llama(kv) as llm, KVStore(None) as one, KVStore(None) as two:
        _, live = converse(MessageCache(llm, one), 6)
        empty(llm)
        _, restored = converse(MessageCache(llm, two), 6, before_turn=lambda: empty(llm))
    assert [result.usage.source for result in restored] == ["none"] + ["ram"] * 5
    assert [result.content for result in restored] == [result.content for result in live]
    for left, stayed in zip(restored, live, strict=True):
        assert left.usage.evaluated_tokens == stayed.usage.evaluated_tokens
        assert left.usage.exact


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
                result = MessageCache(llm, store).chat(messages, **options)
            assert result.content == plain["choices"][0]["message"]["content"]
            assert result.finish_reason == plain["choices"][0]["finish_reason"]
            assert result.usage.completion_tokens == plain["usage"]["completion_tokens"]
            assert result.usage.prompt_tokens == plain["usage"]["prompt_tokens"]


def test_what_is_live_beyond_the_answer_does_not_matter(llm: Llama, cache: MessageCache) -> None:
    """A stop string leaves tokens in the cache that are in no message."""
    first = cache.chat([journal()], **{**GREEDY, "stop": [" noted that"]})
    assert first.content == "I have"
    assert llm.n_tokens > first.usage.prompt_tokens + n_tokens(llm, "I have")
    messages = [journal(), first.message, user(RECALL.fact.question)]
    second = cache.chat(messages, **GREEDY)
    assert second.usage.cached_tokens == first.usage.prompt_tokens + n_tokens(llm, "I have")
    plain = cold(llm, messages)
    assert second.content == plain


def cold(llm: Llama, messages: list[Message]) -> str:
    """The answer without anything reused."""
    empty(llm)
    return MessageCache(llm, KVStore(None)).chat(messages, **GREEDY).content


# --- a history that changes ---


def test_an_edited_message_costs_from_there(llm: Llama, cache: MessageCache) -> None:
    messages, _ = converse(cache, 4)
    same = rendered(messages[:2]).removesuffix("<|assistant|>") + "<|user|>"
    edited = [*messages[:2], {**messages[2], "content": "Zita?"}, *messages[3:]]
    for prepare in (lambda: None, lambda: empty(llm)):
        prepare()
        result = cache.chat(edited, **GREEDY)
        assert result.usage.cached_tokens >= n_tokens(llm, same)
        assert result.usage.evaluated_tokens <= n_tokens(llm, rendered(edited[2:])) + 1
    assert result.content == cold(llm, edited)


def test_a_deleted_message_costs_from_there(llm: Llama, cache: MessageCache) -> None:
    messages, _ = converse(cache, 4)
    deleted = messages[:3] + messages[5:]
    result = cache.chat(deleted, **GREEDY)
    assert n_tokens(llm, rendered(messages[:3])) - 1 <= result.usage.cached_tokens
    assert result.usage.cached_tokens < n_tokens(llm, rendered(messages[:5]))
    assert result.content == cold(llm, deleted)


def test_reordered_messages_are_another_conversation(llm: Llama, cache: MessageCache) -> None:
    messages, _ = converse(cache, 3)
    reordered = [*messages[2:4], *messages[:2], *messages[4:]]
    result = cache.chat(reordered, **GREEDY)
    assert result.usage.cached_tokens < 20
    assert result.content == cold(llm, reordered)


def test_a_branch_and_back(llm: Llama, cache: MessageCache) -> None:
    """Both ends of a conversation stay stored: going back costs one message."""
    messages, _ = converse(cache, 4)
    cache.chat(messages, **GREEDY)
    branch = [*messages[:3], {"role": "assistant", "content": "Ask me later."}, user("Now?")]
    cache.chat(branch, **GREEDY)
    back = cache.chat(messages, **GREEDY)
    assert back.usage.evaluated_tokens == 1  # everything is there; sampling needs the last logits
    assert back.usage.source == "ram"


def test_an_unchanged_prompt_evaluates_one_token(llm: Llama, cache: MessageCache) -> None:
    first = cache.chat([journal()], **GREEDY)
    again = cache.chat([journal()], **GREEDY)
    assert again.usage.evaluated_tokens == 1
    assert again.content == first.content


# --- ids ---


def test_wrong_ids_change_nothing(llm: Llama, cache: MessageCache) -> None:
    messages, _ = converse(cache, 3)
    right = cache.chat(messages, **GREEDY)
    ids = [m["message_id"] for m in messages if "message_id" in m]
    swapped = iter(reversed(ids))
    renamed = [{**m, "message_id": next(swapped)} if "message_id" in m else m for m in messages]
    unknown = [{**m, "message_id": f"other-{i}"} for i, m in enumerate(messages)]
    missing = [{k: v for k, v in m.items() if k != "message_id"} for m in messages]
    for variant in (renamed, unknown, missing):
        empty(llm)
        result = cache.chat(variant, **GREEDY)
        assert result.content == right.content
        assert result.usage.cached_tokens == right.usage.prompt_tokens - 1
    assert result.usage.matched_message_id is None


def test_an_id_that_points_at_other_content_gives_none_of_it(llm: Llama, cache: MessageCache) -> None:
    messages, _ = converse(cache, 2)
    other = make_recall(61_002, 30)
    lying = [
        user(other.messages[0]["content"], message_id=messages[1]["message_id"]),
        {**other.messages[1], "message_id": messages[3]["message_id"]},
        user(other.fact.question),
    ]
    result = cache.chat(lying, **GREEDY)
    assert result.usage.cached_tokens < 5  # <bos><|user|> and the like
    assert result.usage.matched_message_id is None
    assert result.content == cold(llm, lying)


def test_an_answers_id_can_be_given(cache: MessageCache) -> None:
    result = cache.chat([journal()], message_id="turn:1", **GREEDY)
    assert result.message_id == result.message["message_id"] == "turn:1"
    ids = {cache.chat([journal()], **GREEDY).message_id for _ in range(3)}
    assert len(ids) == 3


def test_forgetting_a_message_removes_it_and_what_follows(llm: Llama, store: KVStore) -> None:
    cache = MessageCache(llm, store)
    messages, results = converse(cache, 4)
    n_entries = len(store.entries())
    assert cache.forget(results[1].message_id)
    assert len(store.entries()) < n_entries
    assert not cache.forget(results[1].message_id)
    assert not cache.forget("never-was")
    empty(llm)
    result = cache.chat(messages, **GREEDY)
    assert result.usage.cached_tokens < results[2].usage.prompt_tokens
    assert result.usage.matched_message_id == results[0].message_id


# --- whose ---


def test_tenants_share_nothing(llm: Llama, store: KVStore) -> None:
    ada, bo = MessageCache(llm, store, tenant="ada"), MessageCache(llm, store, tenant="bo")
    messages, _ = converse(ada, 2)
    empty(llm)
    stranger = bo.chat(messages, **GREEDY)
    assert (stranger.usage.cached_tokens, stranger.usage.matched_message_id) == (0, None)
    assert not bo.forget(messages[1]["message_id"])
    empty(llm)
    assert ada.chat(messages, **GREEDY).usage.cached_tokens > 0


def test_a_sessions_kv_goes_with_it(llm: Llama, store: KVStore) -> None:
    messages, _ = converse(MessageCache(llm, store, session="kv-1", tenant="ada"), 3)
    assert store.remove(session="kv-1", tenant="bo") == 0
    assert store.remove(session="kv-1", tenant="ada") == 3
    empty(llm)
    assert MessageCache(llm, store, tenant="ada").chat(messages, **GREEDY).usage.cached_tokens == 0


def test_unregistering_a_session_removes_its_kv(llm: Llama, tmp_path: Path) -> None:
    async def main() -> None:
        with KVStore(tmp_path, key=lambda: bytes(range(32))) as store:
            async with ContextCacheManager("sqlite:", store) as manager:
                kept, gone = [await register(manager, tenant="ada") for _ in range(2)]
                messages, _ = converse(MessageCache(llm, store, tenant="ada", session=gone.kv_cache_ref), 2)
                other = [user("Hi")]
                MessageCache(llm, store, tenant="ada", session=kept.kv_cache_ref).chat(other, **GREEDY)
                await manager.unregister_session_cache(gone.session_id, tenant="ada")
            empty(llm)
            cache = MessageCache(llm, store, tenant="ada")
            assert cache.chat(messages, **GREEDY).usage.cached_tokens < 5
            empty(llm)
            assert cache.chat(other, **GREEDY).usage.source == "ram"

    asyncio.run(main())


async def register(manager: ContextCacheManager, tenant: str) -> CacheSessionMetadata:
    request = CreateContextCacheRequest(model="recall-5m", messages=[journal()])
    answer = await manager.register_session_cache(request, tenant=tenant)
    assert isinstance(answer, CreateCacheResponse)
    metadata = await manager.get_session_metadata(answer.session_id, tenant=tenant)
    assert metadata is not None
    return metadata


# --- streaming ---


def test_streaming_gives_the_same_in_chunks(llm: Llama, cache: MessageCache) -> None:
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
    assert stream.result.content == whole.content == RECALL.fact.answer
    assert stream.result.finish_reason == "stop"
    assert stream.result.message_id == "m-1"


def test_a_stream_closed_early_keeps_what_was_computed(llm: Llama, cache: MessageCache) -> None:
    stream = cache.stream([journal()], **GREEDY)
    for _ in range(4):
        next(stream)
    assert stream.result is None
    stream.close()
    assert stream.result is not None
    assert 0 < len(stream.result.content) < len("I have noted that.")
    empty(llm)
    result = cache.chat([journal(), stream.result.message, user("Go on.")], **GREEDY)
    assert result.usage.source == "ram"
    assert result.usage.cached_tokens >= stream.result.usage.prompt_tokens


def test_tool_calls(llm: Llama, cache: MessageCache) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [4]}}, "required": ["n"]}
    tool = {"type": "function", "function": {"name": "count", "parameters": schema}}
    options = {
        **GREEDY,
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
import test_conversation_chat as t
from mixedkv.conversation import MessageCache
from mixedkv.store import KVStore

folder, n_done, messages = sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
with t.open_llama(sys.argv[5]) as llm, KVStore(folder) as store:
    cache = MessageCache(llm, store, index=folder + "/messages")
    for question in t.QUESTIONS[n_done : n_done + 3]:
        result = cache.chat(messages, **t.GREEDY)
        messages += [result.message, t.user(question)]
        used = [result.usage.source, result.usage.evaluated_tokens, result.usage.matched_message_id]
        print(json.dumps([result.message, *used]))
"""


@pytest.mark.parametrize("kv", ["mixed", "f16"])
def test_a_new_process_goes_on_from_the_store(kv: str, tmp_path: Path) -> None:
    with open_llama(kv) as llm, KVStore(None) as other:
        _, stayed = converse(MessageCache(llm, other), 6)
    messages, answers = [journal()], []
    for n_done in (0, 3):
        arguments = [str(Path(__file__).parent), str(tmp_path), str(n_done), json.dumps(messages), kv]
        command = [sys.executable, "-c", _CHILD, *arguments]
        out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120).stdout
        for i, line in enumerate(out.splitlines()):
            message, source, n_evaluated, matched = json.loads(line)
            if n_done and not i:
                assert source == "disk"
                assert matched == messages[-2]["message_id"]
            assert n_evaluated == stayed[n_done + i].usage.evaluated_tokens
            messages += [message, user(QUESTIONS[n_done + i])]
            answers.append(message["content"])
    assert answers == [result.content for result in stayed]


# --- others at the same Llama, and stores that fail ---


def test_others_may_use_the_llama_in_between(llm: Llama, cache: MessageCache) -> None:
    messages, _ = converse(cache, 2)
    right = cache.chat(messages, **GREEDY)
    llm.create_chat_completion(make_recall(61_003, 20).messages, **GREEDY)  # type: ignore[arg-type]
    again = cache.chat(messages, **GREEDY)
    assert again.content == right.content
    assert again.usage.source == "ram"
    llm.reset()
    assert cache.chat(messages, **GREEDY).content == right.content


def test_a_damaged_store_costs_time_only(tmp_path: Path) -> None:
    with open_llama() as llm, KVStore(tmp_path, max_ram_bytes=0) as store:
        cache = MessageCache(llm, store)
        messages, _ = converse(cache, 2)
        right = cache.chat(messages, **GREEDY)
        for path in tmp_path.rglob("*.safetensors"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        empty(llm)
        result = cache.chat(messages, **GREEDY)
        assert result.usage.cached_tokens == 0
        assert "damaged" in result.usage.reason
        assert result.content == right.content


def test_what_cannot_be_stored_is_said_and_answered(llm: Llama) -> None:
    with KVStore(None, max_ram_bytes=1000) as store:
        result = MessageCache(llm, store).chat([journal()], **GREEDY)
    assert result.content == "I have noted that."
    assert result.usage.stored_tokens == 0
    assert result.usage.reason


def test_exact_only_leaves_out_what_is_not(llm: Llama, store: KVStore) -> None:
    """A mixed cache that is cut lacks recent F16 rows: allowed and said so, or left out."""
    messages, _ = converse(MessageCache(llm, store), 1)
    strict = MessageCache(llm, store, exact_only=True)
    edited = [user(messages[0]["content"].removesuffix("."))]
    assert strict.chat(edited, **GREEDY).usage.cached_tokens == 0
    converse(MessageCache(llm, store), 1)
    loose = MessageCache(llm, store).chat([user(messages[0]["content"][:-20])], **GREEDY).usage
    assert loose.cached_tokens > 200
    assert not loose.exact
    following = strict.chat(messages, **GREEDY).usage
    assert following.exact
    assert following.evaluated_tokens < 20


# --- bad input ---

_BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    ("Hi", "messages"),
    ({"role": "user", "content": "Hi"}, "messages"),
    (["Hi"], r"messages\[0\]"),
    ([{"content": "Hi"}], r"messages\[0\]"),
    ([user("Hi"), {"role": "user", "content": 7}], r"messages\[1\]\.content"),
    ([user("Hi", message_id="../x")], r"messages\[0\]\.message_id"),
    ([user("Hi", message_id="")], r"messages\[0\]\.message_id"),
    ([user("Hi", message_id="a\0b")], r"messages\[0\]\.message_id"),
    ([user("Hi", message_id="a" * 10_000_000)], r"messages\[0\]\.message_id"),
    ([{**user("Hi"), "message_id": 7}], r"messages\[0\]\.message_id"),
]


@pytest.mark.parametrize(("messages", "message"), _BAD_MESSAGES)
def test_bad_messages(cache: MessageCache, messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        cache.chat(messages, **GREEDY)
    assert len(str(error.value)) < 500


def test_bad_values(llm: Llama, store: KVStore, cache: MessageCache, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="message_id"):
        cache.chat([journal()], message_id="a/b")
    with pytest.raises(ValueError, match="message_id"):
        cache.forget("")
    with pytest.raises(ValueError, match="call chat or stream"):
        cache.chat([journal()], stream=True)
    with pytest.raises(ValueError, match="session"):
        MessageCache(llm, store, session="../x")
    with pytest.raises(ValueError, match="tenant"):
        MessageCache(llm, store, tenant="a/b")
    (tmp_path / "text").write_text("no database" * 1000)
    with pytest.raises(ValueError, match="not a message index"):
        MessageCache(llm, store, index=tmp_path / "text")
    with sqlite3.connect(tmp_path / "newer") as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(ValueError, match="upgrade mixedkv"):
        MessageCache(llm, store, index=tmp_path / "newer")
    with pytest.raises(OSError, match="cannot be opened"):
        MessageCache(llm, store, index=tmp_path / "no" / "folder")


def test_sliding_windows_are_cut_where_they_are_whole(zoo_path: Callable[[str], Path]) -> None:
    """Layers with a sliding window have let go of rows that a shorter prompt needs."""
    options = {"kv": "f16", "n_ctx": 512, "n_ubatch": 32, "chat_format": "chatml", "verbose": False}
    long, few = "ab cd " * 50, {**GREEDY, "max_tokens": 4}
    with Llama(zoo_path("gemma2"), swa_full=False, **options) as llm:
        for text in (long + "x", long[:30] + "x", long + "y", long[:200]):
            with KVStore(None) as store:
                cache = MessageCache(llm, store)
                cache.chat([user(long)], **few)
                shared = cache.chat([user(text)], **few)
            empty(llm)
            with KVStore(None) as store:
                assert MessageCache(llm, store).chat([user(text)], **few).content == shared.content


def test_models_that_do_not_keep_rows_are_refused(zoo_path: Callable[[str], Path], store: KVStore) -> None:
    with (
        Llama(zoo_path("mamba"), kv="f16", n_ctx=256, verbose=False) as llm,
        pytest.raises(UnsupportedModelError, match="recurrent"),
    ):
        MessageCache(llm, store)


def test_numbers_of_the_prompt_are_those_of_the_cache(llm: Llama, cache: MessageCache) -> None:
    """input_ids and the cache agree after a restore, or the next call would continue something else."""
    messages, _ = converse(cache, 2)
    empty(llm)
    cache.chat(messages, **GREEDY)
    (sequence,) = llm.kv.stats().sequences
    assert sequence.pos_max + 1 == llm.n_tokens
    expected = llm.tokenize(rendered(messages).encode(), add_bos=False, special=True)
    assert np.array_equal(llm.input_ids[: len(expected)], expected)
