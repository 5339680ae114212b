"""Where sessions are written down, each kind in turn; a manager on it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mixedkv.sessions import ContextCacheManager
from support.servers.remote import redis_server
from support.stores.sessions import Clock, Entries, opened

REDIS = pytest.param("redis", marks=pytest.mark.needs("redis"))
_NUMBER = itertools.count()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis server of this test run's own, on a socket, that keeps nothing."""
    folder = tmp_path_factory.mktemp("redis")
    with redis_server(folder, "--unixsocket", str(folder / "s")):
        yield f"unix://{folder / 's'}"


@pytest.fixture(params=["sqlite", "sqlite-memory", REDIS])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        return f"{request.getfixturevalue('redis_url')}?db={next(_NUMBER) % 16}"
    return "sqlite:" if request.param == "sqlite-memory" else f"sqlite:{tmp_path / 'sessions.sqlite'}"


@pytest.fixture(params=["sqlite", REDIS])
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of sessions that several managers or processes have."""
    if request.param == "redis":
        return str(request.getfixturevalue("redis_url"))
    return f"sqlite:{tmp_path / 's'}"


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
            async with opened(url, store=entries, clock=clock) as (manager,):
                return await body(manager)

        return asyncio.run(main())

    return run_
