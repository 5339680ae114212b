"""Bad ids, requests, settings and metadata stores: each is refused with what is wrong and what to do."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mixedkv.sessions import ContextCacheManager, CreateContextCacheRequest
from mixedkv.sessions.manager import open_metadata
from mixedkv.sessions.records import CreateCacheResponse, explain

pytestmark = pytest.mark.full


def expected(**values: Any) -> CreateContextCacheRequest:
    return CreateContextCacheRequest(**{"model": "m", "prompt": "Once upon a time", **values})


_BAD_IDS = {
    "parent folder": "../secrets",
    "slash": "a/b",
    "backslash": "a\\b",
    "dot": ".",
    "dots": "..",
    "empty": "",
    "nul": "a\0b",
    "newline": "a\n",
    "escape": "\x1b[31m",
    "space": "a b",
    "not ascii": "sn\N{LATIN SMALL LETTER O WITH DIAERESIS}",
    "surrogate": "\ud800",
    "257 characters": "a" * 257,
    "10 MB": "a" * 10_000_000,
}


@pytest.mark.parametrize("bad", _BAD_IDS.values(), ids=_BAD_IDS.keys())
def test_bad_session_ids(bad: str) -> None:
    async def refused(call: Callable[[ContextCacheManager], Awaitable[object]]) -> None:
        manager = ContextCacheManager()
        with pytest.raises(ValueError, match="session_id") as error:
            await call(manager)
        assert len(str(error.value)) < 500
        assert str(error.value).isprintable() or isinstance(error.value, ValidationError)
        await manager.close()

    asyncio.run(refused(lambda m: m.get_session_metadata(bad)))
    asyncio.run(refused(lambda m: m.unregister_session_cache(bad)))
    asyncio.run(refused(lambda m: m.renew_session_cache(bad)))
    asyncio.run(refused(lambda m: m.register_session_cache(expected(session_id=bad))))


@pytest.mark.parametrize("bad", [*_BAD_IDS.values(), "kv..1"], ids=[*_BAD_IDS.keys(), "dots inside"])
def test_a_ref_that_the_store_refuses_is_refused_at_once(bad: str) -> None:
    async def main() -> None:
        manager = ContextCacheManager()
        with pytest.raises(ValueError, match="kv_cache_ref"):
            await manager.register_session_cache(expected(), kv_cache_sidecar_ref=bad)
        await manager.close()

    asyncio.run(main())


@pytest.mark.parametrize("bad", ["../x", "a/b", "a\0b", "\ud800", "a" * 10_000_000])
def test_bad_tenants(bad: str) -> None:
    with pytest.raises(ValueError, match="tenant"):
        asyncio.run(ContextCacheManager().get_session_metadata("s", tenant=bad))
    with pytest.raises(ValueError, match="tenant"):
        asyncio.run(ContextCacheManager().register_session_cache(expected(), tenant=bad))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ttl": 0}, "ttl: "),
        ({"ttl": -1}, "ttl: "),
        ({"ttl": "60"}, "ttl: "),
        ({"ttl": 1.5}, "ttl: "),
        ({"ttl": True}, "ttl: "),
        ({"ttl": 10**30}, "ttl: "),
        ({"model": ""}, "model: "),
        ({"model": None}, "model: "),
        ({"prompt": ""}, "prompt: "),
        ({"prompt": None}, "either prompt or messages"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "either prompt or messages"),
        ({"prompt": None, "messages": []}, "messages: "),
        ({"prompt": None, "messages": [{"role": "king", "content": "Hi"}]}, r"messages\.0\.role: "),
        ({"prompt": None, "messages": [{"role": "user", "content": ["Hi"]}]}, r"messages\.0\.content: "),
        (
            {"prompt": None, "messages": [{"role": "user", "message_id": "../x"}]},
            r"messages\.0\.message_id: ",
        ),
        ({"colour": "red"}, "colour: "),
    ],
)
def test_bad_requests(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        expected(**values)
    assert re.search(message, explain(error.value))


def test_errors_do_not_repeat_the_prompt() -> None:
    with pytest.raises(ValidationError) as error:
        CreateContextCacheRequest(model="m", prompt="my secret", messages=[], ttl="my secret")  # type: ignore[arg-type]
    assert "secret" not in str(error.value)
    assert "secret" not in explain(error.value)


def test_bad_settings_and_values() -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="sweep_seconds=0"):
            ContextCacheManager(sweep_seconds=0)
        with pytest.raises(ValueError, match="max_ttl=0"):
            ContextCacheManager(max_ttl=0)
        manager = ContextCacheManager(max_ttl=100)
        with pytest.raises(ValueError, match=r"ttl=101: use .* 1 to 100"):
            await manager.register_session_cache(expected(ttl=101))
        answer = await manager.register_session_cache(expected(ttl=100))
        assert isinstance(answer, CreateCacheResponse)
        sid = answer.session_id
        for ttl in (0, 101, 1.5, "9", True):
            with pytest.raises(ValueError, match="ttl="):
                await manager.renew_session_cache(sid, ttl)  # type: ignore[arg-type]
        metadata = await manager.get_session_metadata(sid)
        assert metadata is not None
        with pytest.raises(ValueError, match="tenant cannot be changed"):
            await manager.update_session_cache(metadata, tenant="other")
        with pytest.raises(ValueError, match="n_tokens"):
            await manager.update_session_cache(metadata, n_tokens=-1)
        await manager.close()
        with pytest.raises(OSError, match="closed"):
            await manager.get_session_metadata(sid)

    asyncio.run(main())


@pytest.mark.parametrize("url", ["", "sqlite", "mysql://x", "http://x", "/tmp/x"])
def test_unknown_urls(url: str) -> None:
    with pytest.raises(ValueError, match=r"metadata URL .* use sqlite:PATH, redis://"):
        open_metadata(url)


def test_sqlite_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, but long enough to be looked at" * 99)
    with pytest.raises(ValueError, match="not a session database"):
        open_metadata(f"sqlite:{tmp_path / 'text'}")
    with sqlite3.connect(tmp_path / "newer") as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(ValueError, match=r"version 99.*upgrade mixedkv"):
        open_metadata(f"sqlite:{tmp_path / 'newer'}")
    with pytest.raises(OSError, match="cannot be used"):
        open_metadata(f"sqlite:{tmp_path / 'no' / 'folder'}")


def test_sqlite_url_forms(tmp_path: Path) -> None:
    for url in (f"sqlite:{tmp_path / 'a'}", f"sqlite://{tmp_path / 'b'}"):
        asyncio.run(open_metadata(url).close())
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_redis_out_of_reach(tmp_path: Path) -> None:
    pytest.importorskip("redis")

    async def main() -> None:
        manager = ContextCacheManager(f"unix://{tmp_path / 'nobody'}")
        with pytest.raises(OSError, match="Redis does not answer"):
            await manager.get_session_metadata("s")
        await manager.close()

    asyncio.run(main())
