"""Nobody is answered from what is not theirs, whatever ids, tenants, stores and input are like."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.bundled.corpus import make_recall
from mixedkv.engine import PromptCache
from mixedkv.sessions import CacheSessionMetadata, ContextCacheManager, CreateContextCacheRequest
from mixedkv.sessions.records import CreateCacheResponse
from mixedkv.store import Identity, KVStore
from support.engine.conversations import (
    GREEDY,
    QUESTIONS,
    cold,
    converse,
    empty,
    journal,
    n_tokens,
    open_llama,
    rendered,
    user,
)

pytestmark = pytest.mark.full

# --- ids ---


def test_wrong_ids_change_nothing(llm: Llama, cache: PromptCache) -> None:
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
        assert result.text == right.text
        assert result.cached == right.prompt_tokens - 1
    assert result.matched_message_id is None


def test_an_id_that_points_at_other_content_gives_none_of_it(llm: Llama, cache: PromptCache) -> None:
    messages, _ = converse(cache, 2)
    other = make_recall(61_002, 30)
    lying = [
        user(other.messages[0]["content"], message_id=messages[1]["message_id"]),
        {**other.messages[1], "message_id": messages[3]["message_id"]},
        user(other.fact.question),
    ]
    result = cache.chat(lying, **GREEDY)
    assert result.cached < 5  # <bos><|user|> and the like
    assert result.matched_message_id is None
    assert result.text == cold(llm, lying)


def test_an_answers_id_can_be_given(cache: PromptCache) -> None:
    result = cache.chat([journal()], message_id="turn:1", **GREEDY)
    assert result.message_id == result.message["message_id"] == "turn:1"
    ids = {cache.chat([journal()], **GREEDY).message_id for _ in range(3)}
    assert len(ids) == 3


def test_forgetting_a_message_removes_it_and_what_follows(llm: Llama, store: KVStore) -> None:
    cache = PromptCache(llm, store)
    messages, results = converse(cache, 4)
    n_entries = len(store.entries())
    assert cache.forget(results[1].message_id)
    assert len(store.entries()) < n_entries
    assert not cache.forget(results[1].message_id)
    assert not cache.forget("never-was")
    empty(llm)
    result = cache.chat(messages, **GREEDY)
    assert result.cached < results[2].prompt_tokens
    assert result.matched_message_id == results[0].message_id


def test_forgetting_finds_a_message_that_was_stored_again(llm: Llama, store: KVStore) -> None:
    """The entry that first held it was evicted; the next turn stored its tokens in another."""
    cache = PromptCache(llm, store)
    messages, results = converse(cache, 1)
    for entry in store.entries():
        store.remove(entry.id)
    messages += [cache.chat(messages, **GREEDY).message, user(QUESTIONS[1])]
    converse_on = cache.chat(messages, **GREEDY)
    tokens = llm.input_ids[: llm.n_tokens].copy()
    assert converse_on.stored > 0
    assert cache.forget(results[0].message_id)
    match = store.find(Identity.of(llm), tokens)
    assert match is None or match.n_tokens <= results[0].prompt_tokens


def test_forgetting_the_answer_of_an_edited_history(llm: Llama, store: KVStore) -> None:
    """It stands elsewhere in the second history, and its KV there goes too."""
    cache = PromptCache(llm, store)
    messages, results = converse(cache, 2)
    edited = [user("Listen. " + messages[0]["content"]), *messages[1:]]
    empty(llm)
    prompt = cache.chat(edited, **GREEDY).prompt_tokens
    tokens = llm.input_ids[:prompt].copy()
    assert cache.forget(results[0].message_id)
    n_before = n_tokens(llm, rendered(edited[:1]))
    match = store.find(Identity.of(llm), tokens)
    assert match is None or match.n_tokens <= n_before


# --- whose ---


def test_tenants_share_nothing(llm: Llama, store: KVStore) -> None:
    ada, bo = PromptCache(llm, store, tenant="ada"), PromptCache(llm, store, tenant="bo")
    messages, _ = converse(ada, 2)
    empty(llm)
    assert not bo.forget(messages[1]["message_id"])
    stranger = bo.chat(messages, **GREEDY)
    assert (stranger.cached, stranger.matched_message_id) == (0, None)
    bo.forget(messages[1]["message_id"])
    empty(llm)
    assert ada.chat(messages, **GREEDY).cached > 0


def test_tenants_do_not_share_what_is_live(llm: Llama, store: KVStore) -> None:
    ada, bo = PromptCache(llm, store, tenant="ada"), PromptCache(llm, store, tenant="bo")
    for cache in (ada, bo):
        usage = cache.chat([journal()], **GREEDY)
        assert (usage.tier, usage.cached) == ("", 0)
    assert bo.chat([journal()], **GREEDY).cached > 0


def test_what_others_left_live_is_not_gone_on_from(llm: Llama, store: KVStore) -> None:
    cache = PromptCache(llm, store)
    cache.chat([user("Listen.")], **GREEDY)
    llm.create_chat_completion([journal()], **GREEDY)  # type: ignore[arg-type]
    assert cache.chat([journal()], **GREEDY).cached < 5  # <bos><|user|> and the like


@pytest.mark.parametrize("how", ["read on", "closed"])
def test_an_answer_that_was_overtaken_stores_nothing_of_the_other(
    how: str, llm: Llama, store: KVStore
) -> None:
    stream = PromptCache(llm, store, tenant="ada").stream([journal()], **GREEDY)
    next(stream)
    PromptCache(llm, store, tenant="bo").chat([user("Listen.")], **GREEDY)
    tokens = llm.input_ids[: llm.n_tokens].copy()
    if how == "closed":
        stream.close()
    else:
        with pytest.raises(RuntimeError, match="another answer was begun"):
            list(stream)
    assert stream.result is not None
    assert "another answer was begun" in stream.result.reason
    match = store.find(Identity.of(llm, tenant="ada"), tokens)
    assert match is None or match.n_tokens < 5  # <bos><|user|> and the like


def test_a_stream_that_nobody_reads_on_keeps_no_llama_alive(store: KVStore) -> None:
    llm = open_llama()
    stream = PromptCache(llm, store).stream([journal()], **GREEDY)
    next(stream)
    alive = weakref.ref(llm)
    llm.close()
    del llm, stream
    gc.collect()
    assert alive() is None


def test_what_is_live_under_another_window_is_computed_again() -> None:
    with open_llama("mixed:threshold=128,group=32") as llm, KVStore(None) as store:
        cache = PromptCache(llm, store)
        messages, _ = converse(cache, 1)
        llm.kv.set_window(quantization_threshold=32)
        result = cache.chat(messages, **GREEDY)
        assert (result.cached, result.exact) == (0, True)
        assert result.text == cold(llm, messages)


def test_a_sessions_kv_goes_with_it(llm: Llama, store: KVStore) -> None:
    messages, _ = converse(PromptCache(llm, store, session="kv-1", tenant="ada"), 3)
    assert store.remove(session="kv-1", tenant="bo") == 0
    assert store.remove(session="kv-1", tenant="ada") > 0
    assert not store.entries()
    empty(llm)
    assert PromptCache(llm, store, tenant="ada").chat(messages, **GREEDY).cached == 0


def test_unregistering_a_session_removes_its_kv(llm: Llama, tmp_path: Path) -> None:
    async def main() -> None:
        with KVStore(tmp_path, key=lambda: bytes(range(32))) as store:
            async with ContextCacheManager("sqlite:", store) as manager:
                kept, gone = [await register(manager, tenant="ada") for _ in range(2)]
                messages, _ = converse(PromptCache(llm, store, tenant="ada", session=gone.kv_cache_ref), 2)
                other = [user("Hi")]
                PromptCache(llm, store, tenant="ada", session=kept.kv_cache_ref).chat(other, **GREEDY)
                await manager.unregister_session_cache(gone.session_id, tenant="ada")
            empty(llm)
            cache = PromptCache(llm, store, tenant="ada")
            assert cache.chat(messages, **GREEDY).cached < 5
            empty(llm)
            assert cache.chat(other, **GREEDY).tier == "ram"

    asyncio.run(main())


def test_a_session_that_is_removed_while_it_answers_stays_removed(llm: Llama, store: KVStore) -> None:
    async def main() -> None:
        manager = ContextCacheManager("sqlite:", store)
        gone = await register(manager, tenant="ada")
        cache = PromptCache(llm, store, tenant="ada", session=gone.kv_cache_ref)
        stream = cache.stream([journal()], **GREEDY)
        next(stream)
        await manager.unregister_session_cache(gone.session_id, tenant="ada")
        list(stream)
        await manager.close()
        assert stream.result is not None
        assert stream.result.text == "I have noted that."
        assert stream.result.stored == 0
        assert stream.result.reason
        assert not store.entries()

    asyncio.run(main())


async def register(manager: ContextCacheManager, tenant: str) -> CacheSessionMetadata:
    request = CreateContextCacheRequest(model="recall-5m", messages=[journal()])
    answer = await manager.register_session_cache(request, tenant=tenant)
    assert isinstance(answer, CreateCacheResponse)
    metadata = await manager.get_session_metadata(answer.session_id, tenant=tenant)
    assert metadata is not None
    return metadata


# --- others at the same Llama, and stores that fail ---


def test_others_may_use_the_llama_in_between(llm: Llama, cache: PromptCache) -> None:
    messages, _ = converse(cache, 2)
    right = cache.chat(messages, **GREEDY)
    llm.create_chat_completion(make_recall(61_003, 20).messages, **GREEDY)  # type: ignore[arg-type]
    again = cache.chat(messages, **GREEDY)
    assert again.text == right.text
    assert again.tier == "ram"
    llm.reset()
    assert cache.chat(messages, **GREEDY).text == right.text


def test_a_damaged_store_costs_time_only(tmp_path: Path) -> None:
    with open_llama() as llm, KVStore(tmp_path, max_ram_bytes=0) as store:
        cache = PromptCache(llm, store)
        messages, _ = converse(cache, 2)
        right = cache.chat(messages, **GREEDY)
        for path in tmp_path.rglob("*.safetensors"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        empty(llm)
        result = cache.chat(messages, **GREEDY)
        assert result.cached == 0
        assert "damaged" in result.reason
        assert result.text == right.text


def test_what_cannot_be_stored_is_said_and_answered(llm: Llama) -> None:
    with KVStore(None, max_ram_bytes=1000) as store:
        result = PromptCache(llm, store).chat([journal()], **GREEDY)
    assert result.text == "I have noted that."
    assert result.stored == 0
    assert result.reason


def test_exact_only_leaves_out_what_is_not(llm: Llama, store: KVStore) -> None:
    """A mixed cache that is cut lacks recent F16 rows: allowed and said so, or left out."""
    messages, _ = converse(PromptCache(llm, store), 1)
    strict = PromptCache(llm, store)
    edited = [user(messages[0]["content"][:-200])]
    assert strict.chat(edited, **GREEDY).cached == 0
    converse(PromptCache(llm, store), 1)
    loose = PromptCache(llm, store, reuse="prefix")
    shorter = [user(messages[0]["content"][:-400])]
    cut = loose.chat(shorter, **GREEDY)
    assert cut.cached > 150
    assert not cut.exact
    behind = loose.chat([*shorter, cut.message, user(QUESTIONS[0])], **GREEDY)
    assert (behind.tier, behind.exact) == ("context", False)
    following = strict.chat(messages, **GREEDY)
    assert following.exact
    assert following.evaluated < 20


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
def test_bad_messages(cache: PromptCache, messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        cache.chat(messages, **GREEDY)
    assert len(str(error.value)) < 500


def test_bad_values(llm: Llama, store: KVStore, cache: PromptCache) -> None:
    with pytest.raises(ValueError, match="message_id"):
        cache.chat([journal()], message_id="a/b")
    with pytest.raises(ValueError, match="message_id"):
        cache.forget("")
    with pytest.raises(TypeError, match="call chat for a whole answer"):
        cache.chat([journal()], stream=True)
    with pytest.raises(ValueError, match="session"):
        PromptCache(llm, store, session="../x")
    with pytest.raises(ValueError, match="tenant"):
        PromptCache(llm, store, tenant="a/b")


def test_sliding_windows_are_cut_where_they_are_whole(zoo_path: Callable[[str], Path]) -> None:
    """Layers with a sliding window have let go of rows that a shorter prompt needs."""
    options = {"kv": "f16", "n_ctx": 512, "n_ubatch": 32, "chat_format": "chatml", "verbose": False}
    long, few = "ab cd " * 50, {**GREEDY, "max_tokens": 4}
    with Llama(zoo_path("gemma2"), swa_full=False, **options) as llm:
        for text in (long + "x", long[:30] + "x", long + "y", long[:200]):
            with KVStore(None) as store:
                cache = PromptCache(llm, store)
                cache.chat([user(long)], **few)
                shared = cache.chat([user(text)], **few)
            empty(llm)
            with KVStore(None) as store:
                assert PromptCache(llm, store).chat([user(text)], **few).text == shared.text


@pytest.mark.by_model
@pytest.mark.parametrize(
    ("name", "kv"), [("mamba", "f16"), ("lfm2", "f16"), ("lfm2", "mixed"), ("gemma2", "mixed")]
)
def test_models_with_a_state_go_on_from_where_a_turn_ended(
    zoo_path: Callable[[str], Path], tmp_path: Path, name: str, kv: str
) -> None:
    """Live, from memory, and from the disk with another `Llama`; an edit goes on from the turn before it."""
    few: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4}
    options: dict[str, Any] = {"kv": kv, "n_ctx": 1024, "swa_full": False, "chat_format": "chatml"}

    def turns(cache: PromptCache, n: int) -> tuple[list[dict[str, Any]], list[Any]]:
        messages, results = [user("the rain in the town " * 3)], []
        for i in range(n):
            results.append(cache.chat(messages, **few))
            messages = [*messages, {"role": "assistant", "content": "so"}, user(f"and then {i}? " * 3)]
        return messages, results

    with Llama(zoo_path(name), verbose=False, **options) as llm, KVStore(tmp_path) as store:
        messages, results = turns(PromptCache(llm, store), 6)
        assert all(result.cached > 40 for result in results[1:])
        want = []
        for n in range(1, 12, 2):
            empty(llm)
            want.append(PromptCache(llm, KVStore(None)).chat(messages[:n], **few).text)
        assert [result.text for result in results] == want
        edited = [*messages[:4], user("and what else"), *messages[5:7]]
        again = PromptCache(llm, store).chat(edited, **few)
        assert again.cached >= results[1].prompt_tokens - 4
        assert again.exact
    with Llama(zoo_path(name), verbose=False, **options) as llm, KVStore(tmp_path) as store:
        again = PromptCache(llm, store).chat(messages[:11], **few)
        assert again.tier == "disk"
        assert again.cached >= results[4].prompt_tokens
        assert again.text == want[5]


def test_numbers_of_the_prompt_are_those_of_the_cache(llm: Llama, cache: PromptCache) -> None:
    """input_ids and the cache agree after a restore, or the next call would continue something else."""
    messages, _ = converse(cache, 2)
    empty(llm)
    cache.chat(messages, **GREEDY)
    (sequence,) = llm.kv.stats().sequences
    assert sequence.pos_max + 1 == llm.n_tokens
    text = llm.tokenize(rendered(messages).encode(), add_bos=False, special=True)
    expected = [llm.token_bos(), *text]
    assert np.array_equal(llm.input_ids[: len(expected)], expected)
