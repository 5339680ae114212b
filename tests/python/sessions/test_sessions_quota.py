"""What a tenant may keep, and the list of what it keeps: in SQLite and in Redis alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from mixedkv.sessions import CacheSessionMetadata, ContextCacheManager
from mixedkv.sessions.metadata import Held, Quota
from mixedkv.sessions.records import CreateCacheResponse
from support.stores.sessions import Clock, code, created, expected, opened

pytestmark = pytest.mark.full

_BIG = 10**9


def with_quota(url: str, clock: Clock, quotas: dict[str, Quota], body: Callable[..., Any]) -> Any:
    async def main() -> Any:
        async with opened(url, clock=clock, quota=quotas.get) as (manager,):
            return await body(manager)

    return asyncio.run(main())


def test_no_more_than_so_many(url: str, clock: Clock) -> None:
    async def body(manager: ContextCacheManager) -> None:
        ids = [
            created(await manager.register_session_cache(expected(ttl=9), tenant="ada")).session_id
            for _ in range(3)
        ]
        assert code(await manager.register_session_cache(expected(), tenant="ada")) == "session_quota"
        full = await manager.check_quota("ada")
        assert full is not None
        assert "3 sessions" in full.detail
        assert await manager.check_quota("bo") is None
        created(await manager.register_session_cache(expected(), tenant="bo"))
        # a name that is taken says so, although there is no room either
        again = await manager.register_session_cache(expected(session_id=ids[0]), tenant="ada")
        assert code(again) == "session_exists"
        await manager.unregister_session_cache(ids[0], tenant="ada")
        created(await manager.register_session_cache(expected(ttl=9), tenant="ada"))

    with_quota(url, clock, {"ada": Quota(3, _BIG)}, body)


def test_no_more_than_so_many_bytes(url: str, clock: Clock) -> None:
    async def body(manager: ContextCacheManager) -> None:
        first = created(await manager.register_session_cache(expected(prompt="x" * 6000)))
        assert code(await manager.register_session_cache(expected(prompt="x" * 6000))) == "session_quota"
        created(await manager.register_session_cache(expected(prompt="x" * 1000)))
        held = await manager.held("")
        assert held.sessions == 2
        assert 7000 < held.nbytes < 8000
        before = await manager.get_session_metadata(first.session_id)
        assert before is not None
        assert code(await manager.update_session_cache(before, prompt="x" * 9000)) == "session_quota"
        assert await manager.get_session_metadata(first.session_id) == before
        shorter = await manager.update_session_cache(before, prompt="x" * 100)
        assert isinstance(shorter, CacheSessionMetadata)

    with_quota(url, clock, {"": Quota(100, 10_000)}, body)


def test_what_has_expired_takes_no_room(url: str, clock: Clock) -> None:
    async def body(manager: ContextCacheManager) -> None:
        sid = created(await manager.register_session_cache(expected(ttl=5))).session_id
        clock.now += 5
        assert await manager.held("") == Held(0, 0)
        created(await manager.register_session_cache(expected(ttl=5)))
        assert [item.session_id for item in await manager.list_sessions()] != [sid]

    with_quota(url, clock, {"": Quota(1, _BIG)}, body)


def test_a_smaller_quota_takes_nothing_away(url: str, clock: Clock) -> None:
    quotas = {"": Quota(5, _BIG)}

    async def body(manager: ContextCacheManager) -> None:
        sid = created(await manager.register_session_cache(expected(ttl=5))).session_id
        quotas[""] = Quota(0, 0)
        assert code(await manager.register_session_cache(expected())) == "session_quota"
        assert isinstance(await manager.renew_session_cache(sid, 100), CacheSessionMetadata)

    with_quota(url, clock, quotas, body)


def test_the_quota_holds_for_several_at_once(shared_url: str, clock: Clock) -> None:
    async def main() -> list[object]:
        async with opened(shared_url, 4, clock=clock, quota=lambda tenant: Quota(5, _BIG)) as managers:
            jobs = [m.register_session_cache(expected()) for m in managers for _ in range(8)]
            return await asyncio.gather(*jobs)

    answers = asyncio.run(main())
    assert sum(isinstance(answer, CreateCacheResponse) for answer in answers) == 5


def test_a_tenants_list_comes_in_pages(run: Callable[..., Any], clock: Clock) -> None:
    async def body(manager: ContextCacheManager) -> None:
        names = [f"s{i:02}" for i in range(25)]
        for name in reversed(names):
            await manager.register_session_cache(expected(session_id=name, ttl=60), tenant="ada")
        await manager.register_session_cache(expected(session_id="s99", ttl=60), tenant="bo")
        await manager.register_session_cache(expected(session_id="gone", ttl=1), tenant="ada")
        clock.now += 1
        first = await manager.list_sessions("ada")
        rest = await manager.list_sessions("ada", after=first[-1].session_id)
        assert [item.session_id for item in first] == names[:20]
        assert [item.session_id for item in rest] == names[20:]
        assert {item.expires_at for item in first} == {clock.now + 59}
        assert sum(item.nbytes for item in first + rest) == (await manager.held("ada")).nbytes
        assert (await manager.held()).sessions == 26
        assert await manager.list_sessions("nobody") == []

    run(body)
