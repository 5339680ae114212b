"""Sessions in tests: a clock that stands still, a store that notes what it is told, short names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from mixedkv.sessions import ContextCacheManager, CreateContextCacheRequest
from mixedkv.sessions.records import CreateCacheResponse, ErrorResponse
from mixedkv.store import KVStore
from support.patience import PATIENCE


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


async def empty(url: str) -> None:
    if url.startswith("unix"):
        import redis.asyncio

        client = redis.asyncio.from_url(url)
        await client.flushdb()
        await client.aclose()


@asynccontextmanager
async def opened(url: str, n: int = 1, **options: Any) -> AsyncIterator[list[ContextCacheManager]]:
    """Managers of the same sessions, of which there are none yet."""
    await empty(url)
    managers = [ContextCacheManager(url, **options) for _ in range(n)]
    try:
        yield managers
    finally:
        for manager in managers:
            await manager.close()


def expected(**values: Any) -> CreateContextCacheRequest:
    return CreateContextCacheRequest(**{"model": "m", "prompt": "Once upon a time", **values})


def created(answer: object) -> CreateCacheResponse:
    assert isinstance(answer, CreateCacheResponse), answer
    return answer


def code(answer: object) -> str:
    assert isinstance(answer, ErrorResponse), answer
    return answer.code


async def come(what: Callable[[], bool]) -> None:
    """Wait for what another task does."""

    async def look() -> None:
        while not what():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(look(), PATIENCE)
