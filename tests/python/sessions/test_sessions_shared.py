"""Several writers of the same sessions, and records that are not what they should be."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from mixedkv.sessions import CacheSessionMetadata, ContextCacheManager
from mixedkv.sessions.manager import open_metadata
from mixedkv.sessions.metadata import Key
from mixedkv.sessions.records import CreateCacheResponse
from support.patience import PATIENCE
from support.stores.sessions import Clock, Entries, code, created, empty, expected, opened

pytestmark = pytest.mark.full

# --- several at once ---


def test_a_turn_is_not_lost_to_another(run: Callable[..., Any]) -> None:
    async def body(manager: ContextCacheManager) -> None:
        sid = created(await manager.register_session_cache(expected())).session_id
        before = await manager.get_session_metadata(sid)
        assert before is not None
        first = await manager.update_session_cache(before, prompt="Once upon a time there", n_tokens=9)
        assert isinstance(first, CacheSessionMetadata)
        assert code(await manager.update_session_cache(before, prompt="Once more")) == "session_changed"
        assert await manager.get_session_metadata(sid) == first

    run(body)


def test_one_of_many_registers_a_name(shared_url: str, clock: Clock) -> None:
    async def main() -> list[object]:
        async with opened(shared_url, 8, clock=clock) as managers:
            jobs = [m.register_session_cache(expected(session_id="s")) for m in managers for _ in range(8)]
            return await asyncio.gather(*jobs)

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


def test_several_processes(shared_url: str) -> None:
    """What one process registers all see, and nothing is lost when they write at the same time."""

    async def before() -> None:
        async with opened(shared_url) as (manager,):
            await manager.register_session_cache(expected(session_id="parent"))

    async def after() -> int:
        manager = ContextCacheManager(shared_url)
        names = [f"child{c}-{i}" for c in range(2) for i in range(20)]
        found = [await manager.get_session_metadata(name) for name in names]
        await manager.close()
        return sum(metadata is not None for metadata in found)

    asyncio.run(before())
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _CHILD, shared_url, f"child{c}"], stdout=subprocess.PIPE, text=True
        )
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
        await empty(url)
        metadata = open_metadata(url)
        manager = ContextCacheManager(metadata, entries, clock=clock)
        assert await metadata.put(Key("", "s"), record, clock.now + 9) == "done"
        assert await manager.get_session_metadata("s") is None
        assert code(await manager.unregister_session_cache("s")) == "session_not_found"
        created(await manager.register_session_cache(expected(session_id="s")))
        await manager.close()

    asyncio.run(main())


def test_a_record_moved_to_another_name_is_unknown(url: str, clock: Clock) -> None:
    async def main() -> None:
        await empty(url)
        metadata = open_metadata(url)
        manager = ContextCacheManager(metadata, clock=clock)
        await manager.register_session_cache(expected(session_id="s"), tenant="ada")
        record = await metadata.get(Key("ada", "s"))
        assert record is not None
        await metadata.put(Key("bo", "s"), record, clock.now + 9)
        assert await manager.get_session_metadata("s", tenant="bo") is None
        await manager.close()

    asyncio.run(main())
