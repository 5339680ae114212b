"""Where sessions are written down, each kind in turn; a manager on it."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mixedkv.sessions import ContextCacheManager
from support.patience import PATIENCE, wait_for
from support.session_support import Clock, Entries, empty

_NUMBER = itertools.count()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis server of this test run's own, on a socket, that keeps nothing."""
    pytest.importorskip("redis", reason="the redis package is not installed")
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server on the path: apt-get install redis-server")
    folder = tmp_path_factory.mktemp("redis")
    path = folder / "s"
    options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no"]
    server = subprocess.Popen([program, *options, "--dir", str(folder)], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: _listens(path) or server.poll() is not None)
        assert server.poll() is None, "redis-server ended at once"
        yield f"unix://{path}"
    finally:
        server.terminate()
        server.wait(PATIENCE)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


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
            await empty(url)
            manager = ContextCacheManager(url, entries, clock=clock)
            try:
                return await body(manager)
            finally:
                await manager.close()

        return asyncio.run(main())

    return run_
