"""Sessions live for their time, belong to one tenant, take their KV along: in SQLite and in Redis alike."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest

from mixedkv.sessions import CacheSessionMetadata, ContextCacheManager, CreateContextCacheRequest
from mixedkv.sessions.records import CreateCacheResponse, DeleteCacheResponse, ErrorResponse
from support.patience import PATIENCE
from support.stores.sessions import Clock, Entries, code, come, created, empty, expected

pytestmark = pytest.mark.core

# --- the life of a session ---


def test_register_find_unregister(run: Callable[..., Any], clock: Clock, entries: Entries) -> None:
    async def body(manager: ContextCacheManager) -> None:
        answer = created(await manager.register_session_cache(expected(ttl=60), n_tokens=7))
        assert (answer.model, answer.n_tokens, answer.usage.prompt_tokens) == ("m", 7, 7)
        assert answer.expires_at == answer.created + 60 == clock.now + 60
        found = await manager.get_session_metadata(answer.session_id)
        assert found is not None
        assert (found.prompt, found.messages, found.n_tokens) == ("Once upon a time", None, 7)
        assert not entries.removed
        gone = await manager.unregister_session_cache(answer.session_id)
        assert gone == DeleteCacheResponse(session_id=answer.session_id)
        assert entries.removed == [found.kv_cache_ref]
        assert await manager.get_session_metadata(answer.session_id) is None
        assert code(await manager.unregister_session_cache(answer.session_id)) == "session_not_found"

    run(body)


def test_what_aibrix_gives_is_taken(run: Callable[..., Any]) -> None:
    """Its design passes the answer that evaluated the context, and the name of its KV."""

    async def body(manager: ContextCacheManager) -> None:
        response = CreateCacheResponse(
            id="cmpl-1",
            session_id="session-01",
            model="m",
            created=1752594611,
            usage={"prompt_tokens": 6, "completion_tokens": 87, "total_tokens": 93},  # type: ignore[arg-type]
        )
        request = CreateContextCacheRequest(model="m", prompt="Say this is a test", ttl=60)
        answer = created(await manager.register_session_cache(request, response, "kv-7"))
        assert (answer.id, answer.session_id, answer.usage) == ("cmpl-1", "session-01", response.usage)
        found = await manager.get_session_metadata("session-01")
        assert found is not None
        assert (found.kv_cache_ref, found.n_tokens, found.model_id) == ("kv-7", 6, "m")
        again = await manager.register_session_cache(request, response, "kv-7")
        assert code(again) == "session_exists"

    run(body)


def test_messages_come_back_as_they_were(run: Callable[..., Any]) -> None:
    messages = [
        {"role": "system", "content": "Snö \N{SNOWMAN} \x00 \n"},
        {"role": "user", "content": "", "message_id": "msg-1", "name": "Ada"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f"}}]},
        {"role": "tool", "content": "4", "tool_call_id": "c"},
    ]

    async def body(manager: ContextCacheManager) -> None:
        answer = created(await manager.register_session_cache(expected(prompt=None, messages=messages)))
        found = await manager.get_session_metadata(answer.session_id)
        assert found is not None
        assert [m.model_dump(exclude_unset=True) for m in found.messages or []] == [
            {key: value for key, value in m.items() if value is not None} for m in messages
        ]

    run(body)


def test_a_given_id_is_kept_and_taken_once(run: Callable[..., Any]) -> None:
    async def body(manager: ContextCacheManager) -> None:
        answer = created(await manager.register_session_cache(expected(session_id="chat:7")))
        assert answer.session_id == "chat:7"
        assert code(await manager.register_session_cache(expected(session_id="chat:7"))) == "session_exists"

    run(body)


def test_made_ids_differ(run: Callable[..., Any]) -> None:
    async def body(manager: ContextCacheManager) -> set[str]:
        answers = [created(await manager.register_session_cache(expected())) for _ in range(50)]
        return {answer.session_id for answer in answers}

    assert len(run(body)) == 50


# --- time ---


def test_expired_is_unknown(run: Callable[..., Any], clock: Clock) -> None:
    async def body(manager: ContextCacheManager) -> None:
        answer = created(await manager.register_session_cache(expected(ttl=10)))
        sid = answer.session_id
        clock.now += 9.5
        metadata = await manager.get_session_metadata(sid)
        assert metadata is not None
        clock.now += 0.5
        never = await manager.unregister_session_cache("never-was")
        late = [
            await manager.unregister_session_cache(sid),
            await manager.renew_session_cache(sid, 100),
            await manager.update_session_cache(metadata, n_tokens=3),
        ]
        assert await manager.get_session_metadata(sid) is None
        for answer_ in late:
            assert isinstance(answer_, ErrorResponse)
            assert answer_.detail.replace(sid, "never-was") == never.detail
            assert answer_.code == never.code

    run(body)


def test_renewing(run: Callable[..., Any], clock: Clock) -> None:
    async def body(manager: ContextCacheManager) -> None:
        sid = created(await manager.register_session_cache(expected(ttl=10))).session_id
        clock.now += 9
        renewed = await manager.renew_session_cache(sid)
        assert isinstance(renewed, CacheSessionMetadata)
        assert (renewed.ttl, renewed.expires_at) == (10, clock.now + 10)
        longer = await manager.renew_session_cache(sid, 1000)
        assert isinstance(longer, CacheSessionMetadata)
        clock.now += 999
        assert await manager.get_session_metadata(sid) == longer
        assert await manager.sweep() == 0

    run(body)


def test_the_sweep_removes_what_has_expired_and_only_that(
    run: Callable[..., Any], clock: Clock, entries: Entries
) -> None:
    async def body(manager: ContextCacheManager) -> None:
        short = [created(await manager.register_session_cache(expected(ttl=5))) for _ in range(300)]
        long = created(await manager.register_session_cache(expected(ttl=50)))
        refs = {(await manager.get_session_metadata(s.session_id)).kv_cache_ref for s in short}  # type: ignore[union-attr]
        clock.now += 5
        assert await manager.sweep() == 300
        assert sorted(entries.removed) == sorted(refs)
        assert await manager.sweep() == 0
        assert await manager.get_session_metadata(long.session_id) is not None

    run(body)


def test_a_session_that_cannot_be_removed_stops_no_other(url: str, clock: Clock) -> None:
    """More of them than one batch holds, and before all others."""

    class Failing(Entries):
        def remove(self, entry: str | None = None, *, session: str | None = None, tenant: str = "") -> int:
            if session is not None and session.startswith("bad"):
                raise RuntimeError("this one cannot be removed")
            return super().remove(entry, session=session, tenant=tenant)

    async def main() -> None:
        await empty(url)
        manager = ContextCacheManager(url, Failing(), clock=clock)
        for i in range(300):
            await manager.register_session_cache(expected(ttl=1), kv_cache_sidecar_ref=f"bad-{i}")
        for _ in range(5):
            await manager.register_session_cache(expected(ttl=2))
        clock.now += 9
        assert await manager.sweep() == 5
        assert await manager.sweep() == 0
        await manager.close()

    asyncio.run(main())


def test_an_expired_id_can_be_registered_again_and_has_other_kv(
    run: Callable[..., Any], clock: Clock, entries: Entries
) -> None:
    async def body(manager: ContextCacheManager) -> None:
        await manager.register_session_cache(expected(session_id="s", ttl=5))
        first = await manager.get_session_metadata("s")
        clock.now += 5
        created(await manager.register_session_cache(expected(session_id="s", prompt="Another")))
        second = await manager.get_session_metadata("s")
        assert first is not None
        assert second is not None
        assert entries.removed == [first.kv_cache_ref]
        assert second.kv_cache_ref != first.kv_cache_ref
        assert second.prompt == "Another"

    run(body)


def test_the_background_sweep_starts_works_and_stops(url: str, clock: Clock, entries: Entries) -> None:
    async def main() -> None:
        await empty(url)
        manager = ContextCacheManager(url, entries, clock=clock, sweep_seconds=0.01)
        async with manager:
            manager.start()  # again: no second task
            assert sum(task.get_name() == "mixedkv-sweep" for task in asyncio.all_tasks()) == 1
            await manager.register_session_cache(expected(ttl=5))
            await asyncio.sleep(0.05)
            assert not entries.removed
            clock.now += 5
            await come(lambda: bool(entries.removed))
            assert len(entries.removed) == 1
        assert all(task.get_name() != "mixedkv-sweep" for task in asyncio.all_tasks())
        await manager.close()

    asyncio.run(main())


def test_the_background_sweep_survives_errors(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Entries):
        def remove(self, entry: str | None = None, *, session: str | None = None, tenant: str = "") -> int:
            n = super().remove(entry, session=session, tenant=tenant)
            if len(self.removed) == 1:
                raise OSError("disk on fire")
            return n

    async def main() -> int:
        entries = Failing()
        async with ContextCacheManager("sqlite:", entries, clock=clock, sweep_seconds=0.01) as manager:
            await manager.register_session_cache(expected(ttl=1))
            clock.now += 1
            await come(lambda: len(entries.removed) == 2)
        return len(entries.removed)

    with caplog.at_level(logging.WARNING, "mixedkv.sessions"):
        assert asyncio.run(main()) == 2
    assert "disk on fire" in caplog.text


def test_the_background_sweep_stops_though_a_client_swallows_the_cancellation() -> None:
    class Deaf(ContextCacheManager):
        async def sweep(self) -> int:
            began.append(1)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(2 * PATIENCE)
            return 0

    began: list[int] = []

    async def main() -> None:
        manager = Deaf("sqlite:", sweep_seconds=0.01)
        manager.start()
        await come(lambda: bool(began))
        await asyncio.wait_for(manager.close(), PATIENCE)

    asyncio.run(main())


# --- whose ---


def test_another_tenants_session_looks_unknown(run: Callable[..., Any], entries: Entries) -> None:
    async def body(manager: ContextCacheManager) -> None:
        await manager.register_session_cache(expected(session_id="s"), tenant="ada")
        for tenant in ("", "bo", "ad"):
            other = await manager.unregister_session_cache("s", tenant=tenant)
            unknown = await manager.unregister_session_cache("t", tenant=tenant)
            assert isinstance(other, ErrorResponse)
            assert other.detail == unknown.detail.replace("'t'", "'s'")
            assert await manager.get_session_metadata("s", tenant=tenant) is None
            assert code(await manager.renew_session_cache("s", 9, tenant=tenant)) == "session_not_found"
        assert not entries.removed
        mine = await manager.get_session_metadata("s", tenant="ada")
        assert mine is not None
        created(await manager.register_session_cache(expected(session_id="s"), tenant="bo"))
        theirs = await manager.get_session_metadata("s", tenant="bo")
        assert theirs is not None
        assert mine.kv_cache_ref != theirs.kv_cache_ref
        await manager.unregister_session_cache("s", tenant="bo")
        assert entries.removed == [theirs.kv_cache_ref]
        assert await manager.get_session_metadata("s", tenant="ada") == mine

    run(body)


def test_names_that_could_be_confused_are_not(run: Callable[..., Any]) -> None:
    """tenant and id are two things, however they are written next to each other."""
    pairs = [("", "a:b"), ("a", "b"), ("a:b", "c"), ("a", "b:c"), ("1:a", "b"), ("", "1:a:b")]

    async def body(manager: ContextCacheManager) -> None:
        for n, (tenant, sid) in enumerate(pairs):
            created(await manager.register_session_cache(expected(session_id=sid), tenant=tenant, n_tokens=n))
        for n, (tenant, sid) in enumerate(pairs):
            found = await manager.get_session_metadata(sid, tenant=tenant)
            assert found is not None
            assert found.n_tokens == n

    run(body)
