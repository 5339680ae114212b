"""Sessions live for their time, belong to one tenant, take their KV along: in SQLite and in Redis alike."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mixedkv.sessions import (
    CacheSessionMetadata,
    ContextCacheManager,
    CreateCacheResponse,
    CreateContextCacheRequest,
    DeleteCacheResponse,
    ErrorResponse,
    open_metadata,
)
from mixedkv.sessions.metadata import Key
from mixedkv.store import KVStore
from support.patience import PATIENCE, wait_for

_NUMBER = itertools.count()


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


class Entries(KVStore):
    """A store that notes whose entries it was told to remove."""

    def __init__(self) -> None:
        super().__init__(None)
        self.removed: list[str] = []

    def remove(self, entry: str | None = None, *, session: str | None = None, tenant: str = "") -> int:
        self.removed.append(str(session))
        return super().remove(entry, session=session, tenant=tenant)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis server of this test run's own, on a socket, that keeps nothing."""
    pytest.importorskip("redis", reason="the redis package is not installed")
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server on the path: apt-get install redis-server")
    folder = tmp_path_factory.mktemp("redis")
    socket = folder / "s"
    options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no"]
    server = subprocess.Popen([program, *options, "--dir", str(folder)], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: socket.exists() or server.poll() is not None)
        assert server.poll() is None, "redis-server ended at once"
        yield f"unix://{socket}"
    finally:
        server.terminate()
        server.wait(PATIENCE)


@pytest.fixture(params=["sqlite", "sqlite-memory", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        return f"{request.getfixturevalue('redis_url')}?db={next(_NUMBER) % 16}"
    return "sqlite:" if request.param == "sqlite-memory" else f"sqlite:{tmp_path / 'sessions.sqlite'}"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def entries() -> Entries:
    return Entries()


@pytest.fixture
def run(url: str, clock: Clock, entries: Entries) -> Callable[..., Any]:
    """run(body) awaits body(manager) on a manager that is closed afterwards."""

    def run_(body: Callable[[ContextCacheManager], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            await _empty(url)
            manager = ContextCacheManager(url, entries, clock=clock)
            try:
                return await body(manager)
            finally:
                await manager.close()

        return asyncio.run(main())

    return run_


async def _empty(url: str) -> None:
    if url.startswith("unix"):
        import redis.asyncio

        client = redis.asyncio.from_url(url)
        await client.flushdb()
        await client.aclose()


def wanted(**values: Any) -> CreateContextCacheRequest:
    return CreateContextCacheRequest(**{"model": "m", "prompt": "Once upon a time", **values})


def created(answer: object) -> CreateCacheResponse:
    assert isinstance(answer, CreateCacheResponse), answer
    return answer


def code(answer: object) -> str:
    assert isinstance(answer, ErrorResponse), answer
    return answer.code


# --- the life of a session ---


def test_register_find_unregister(run: Callable[..., Any], clock: Clock, entries: Entries) -> None:
    async def body(manager: ContextCacheManager) -> None:
        answer = created(await manager.register_session_cache(wanted(ttl=60), n_tokens=7))
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


def test_messages_come_back_as_they_were(run: Callable[..., Any]) -> None:
    messages = [
        {"role": "system", "content": "Snö \N{SNOWMAN} \x00 \n"},
        {"role": "user", "content": "", "message_id": "msg-1", "name": "Ada"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f"}}]},
        {"role": "tool", "content": "4", "tool_call_id": "c"},
    ]

    async def body(manager: ContextCacheManager) -> None:
        answer = created(await manager.register_session_cache(wanted(prompt=None, messages=messages)))
        found = await manager.get_session_metadata(answer.session_id)
        assert found is not None
        assert [m.model_dump(exclude_unset=True) for m in found.messages or []] == [
            {key: value for key, value in m.items() if value is not None} for m in messages
        ]

    run(body)


def test_a_given_id_is_kept_and_taken_once(run: Callable[..., Any]) -> None:
    async def body(manager: ContextCacheManager) -> None:
        answer = created(await manager.register_session_cache(wanted(session_id="chat:7")))
        assert answer.session_id == "chat:7"
        assert code(await manager.register_session_cache(wanted(session_id="chat:7"))) == "session_exists"

    run(body)


def test_made_ids_differ(run: Callable[..., Any]) -> None:
    async def body(manager: ContextCacheManager) -> set[str]:
        answers = [created(await manager.register_session_cache(wanted())) for _ in range(50)]
        return {answer.session_id for answer in answers}

    assert len(run(body)) == 50


# --- time ---


def test_expired_is_unknown(run: Callable[..., Any], clock: Clock) -> None:
    async def body(manager: ContextCacheManager) -> None:
        answer = created(await manager.register_session_cache(wanted(ttl=10)))
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
        sid = created(await manager.register_session_cache(wanted(ttl=10))).session_id
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
        short = [created(await manager.register_session_cache(wanted(ttl=5))) for _ in range(300)]
        long = created(await manager.register_session_cache(wanted(ttl=50)))
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
        await _empty(url)
        manager = ContextCacheManager(url, Failing(), clock=clock)
        for i in range(300):
            await manager.register_session_cache(wanted(ttl=1), kv_cache_ref=f"bad-{i}")
        for _ in range(5):
            await manager.register_session_cache(wanted(ttl=2))
        clock.now += 9
        assert await manager.sweep() == 5
        assert await manager.sweep() == 0
        await manager.close()

    asyncio.run(main())


def test_an_expired_id_can_be_registered_again_and_has_other_kv(
    run: Callable[..., Any], clock: Clock, entries: Entries
) -> None:
    async def body(manager: ContextCacheManager) -> None:
        await manager.register_session_cache(wanted(session_id="s", ttl=5))
        first = await manager.get_session_metadata("s")
        clock.now += 5
        created(await manager.register_session_cache(wanted(session_id="s", prompt="Another")))
        second = await manager.get_session_metadata("s")
        assert first is not None
        assert second is not None
        assert entries.removed == [first.kv_cache_ref]
        assert second.kv_cache_ref != first.kv_cache_ref
        assert second.prompt == "Another"

    run(body)


async def come(what: Callable[[], bool]) -> None:
    """Wait for what another task does."""

    async def look() -> None:
        while not what():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(look(), PATIENCE)


def test_the_background_sweep_starts_works_and_stops(url: str, clock: Clock, entries: Entries) -> None:
    async def main() -> None:
        await _empty(url)
        manager = ContextCacheManager(url, entries, clock=clock, sweep_seconds=0.01)
        async with manager:
            manager.start()  # again: no second task
            assert sum(task.get_name() == "mixedkv-sweep" for task in asyncio.all_tasks()) == 1
            await manager.register_session_cache(wanted(ttl=5))
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
            await manager.register_session_cache(wanted(ttl=1))
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
        await manager.register_session_cache(wanted(session_id="s"), tenant="ada")
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
        created(await manager.register_session_cache(wanted(session_id="s"), tenant="bo"))
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
            created(await manager.register_session_cache(wanted(session_id=sid), tenant=tenant, n_tokens=n))
        for n, (tenant, sid) in enumerate(pairs):
            found = await manager.get_session_metadata(sid, tenant=tenant)
            assert found is not None
            assert found.n_tokens == n

    run(body)


# --- several at once ---


def test_a_turn_is_not_lost_to_another(run: Callable[..., Any]) -> None:
    async def body(manager: ContextCacheManager) -> None:
        sid = created(await manager.register_session_cache(wanted())).session_id
        before = await manager.get_session_metadata(sid)
        assert before is not None
        first = await manager.update_session_cache(before, prompt="Once upon a time there", n_tokens=9)
        assert isinstance(first, CacheSessionMetadata)
        assert code(await manager.update_session_cache(before, prompt="Once more")) == "session_changed"
        assert await manager.get_session_metadata(sid) == first

    run(body)


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_one_of_many_registers_a_name(
    kind: str, tmp_path: Path, clock: Clock, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:{tmp_path / 's'}" if kind == "sqlite" else request.getfixturevalue("redis_url")

    async def main() -> list[object]:
        await _empty(url)
        managers = [ContextCacheManager(url, clock=clock) for _ in range(8)]
        jobs = [m.register_session_cache(wanted(session_id="s")) for m in managers for _ in range(8)]
        try:
            return await asyncio.gather(*jobs)
        finally:
            for manager in managers:
                await manager.close()

    answers = asyncio.run(main())
    assert sum(isinstance(answer, CreateCacheResponse) for answer in answers) == 1


_CHILD = """
import asyncio, sys
from mixedkv.sessions import ContextCacheManager, CreateContextCacheRequest

async def main():
    manager = ContextCacheManager(sys.argv[1])
    for i in range(20):
        request = CreateContextCacheRequest(model="m", prompt="p", session_id=f"{sys.argv[2]}-{i}")
        await manager.register_session_cache(request)
    print((await manager.get_session_metadata("parent")).prompt)
    await manager.close()

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_several_processes(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """What one process registers all see, and nothing is lost when they write at the same time."""
    url = f"sqlite:{tmp_path / 's'}" if kind == "sqlite" else request.getfixturevalue("redis_url")

    async def before() -> None:
        await _empty(url)
        manager = ContextCacheManager(url)
        await manager.register_session_cache(wanted(session_id="parent"))
        await manager.close()

    async def after() -> int:
        manager = ContextCacheManager(url)
        names = [f"child{c}-{i}" for c in range(2) for i in range(20)]
        found = [await manager.get_session_metadata(name) for name in names]
        await manager.close()
        return sum(metadata is not None for metadata in found)

    asyncio.run(before())
    children = [
        subprocess.Popen([sys.executable, "-c", _CHILD, url, f"child{c}"], stdout=subprocess.PIPE, text=True)
        for c in range(2)
    ]
    assert [child.communicate(timeout=PATIENCE)[0] for child in children] == ["Once upon a time\n"] * 2
    assert asyncio.run(after()) == 40


# --- a metadata store that is not what it should be ---


@pytest.mark.parametrize(
    "record",
    [b"", b"{}", b"mixedkv-session 1\n", b"mixedkv-session 1\n{}", b"mixedkv-session 2\n{}", b"\xff" * 99],
)
def test_a_damaged_record_is_an_unknown_session(
    record: bytes, url: str, clock: Clock, entries: Entries
) -> None:
    async def main() -> None:
        await _empty(url)
        metadata = open_metadata(url)
        manager = ContextCacheManager(metadata, entries, clock=clock)
        assert await metadata.add(Key("", "s"), record, clock.now + 9)
        assert await manager.get_session_metadata("s") is None
        assert code(await manager.unregister_session_cache("s")) == "session_not_found"
        created(await manager.register_session_cache(wanted(session_id="s")))
        await manager.close()

    asyncio.run(main())


def test_a_record_moved_to_another_name_is_unknown(url: str, clock: Clock) -> None:
    async def main() -> None:
        await _empty(url)
        metadata = open_metadata(url)
        manager = ContextCacheManager(metadata, clock=clock)
        await manager.register_session_cache(wanted(session_id="s"), tenant="ada")
        record = await metadata.get(Key("ada", "s"))
        assert record is not None
        await metadata.add(Key("bo", "s"), record, clock.now + 9)
        assert await manager.get_session_metadata("s", tenant="bo") is None
        await manager.close()

    asyncio.run(main())
