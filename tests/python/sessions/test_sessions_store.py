"""Sessions and the store of their KV: encrypted alike, and neither outlives the other."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from mixedkv.sessions import CacheSessionMetadata, ContextCacheManager
from mixedkv.sessions.manager import open_metadata
from mixedkv.sessions.metadata import PLAIN, Key, RecordCodec, beside
from mixedkv.sessions.metadata_sqlite import reseal
from mixedkv.store import KVStore
from mixedkv.store.encryption import KeyCipher
from support.stores.blocks import identity, make_block
from support.stores.sessions import code, created, expected

pytestmark = pytest.mark.core

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
TEXT = "Once upon a time in a wood"


def with_key(key: bytes) -> RecordCodec:
    return RecordCodec(KeyCipher(lambda: key))


def find(url: str, session: str, **options: Any) -> CacheSessionMetadata | None:
    async def main() -> CacheSessionMetadata | None:
        manager = ContextCacheManager(url, **options)
        found = await manager.get_session_metadata(session)
        await manager.close()
        return found

    return asyncio.run(main())


def register(url: str, session: str, **options: Any) -> CacheSessionMetadata:
    async def main() -> None:
        manager = ContextCacheManager(url, **options)
        created(await manager.register_session_cache(expected(session_id=session, prompt=TEXT)))
        await manager.close()

    asyncio.run(main())
    found = find(url, session, **options)
    assert found is not None
    return found


def test_with_a_key_prompts_cannot_be_read(url: str) -> None:
    async def main() -> None:
        for n, codec in enumerate((PLAIN, with_key(KEY))):
            metadata = open_metadata(url)
            manager = ContextCacheManager(metadata, codec=codec)
            created(await manager.register_session_cache(expected(session_id=f"s{n}", prompt=TEXT)))
            record = await metadata.get(Key("", f"s{n}"))
            assert record is not None
            assert (TEXT.encode() in record) == (codec is PLAIN)
            found = await manager.get_session_metadata(f"s{n}")
            assert found is not None
            assert found.prompt == TEXT
            await manager.close()

    asyncio.run(main())


def test_a_sealed_session_belongs_to_its_name_and_its_key(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path / 's'}"
    register(url, "s", codec=with_key(KEY))
    assert find(url, "s", codec=with_key(OTHER_KEY)) is None
    assert find(url, "s") is None

    async def move() -> None:
        metadata = open_metadata(url)
        record = await metadata.get(Key("", "s"))
        assert record is not None
        assert await metadata.put(Key("", "t"), record, time.time() + 99) == "done"
        assert await metadata.put(Key("", "u"), record[:-1], time.time() + 99) == "done"
        await metadata.close()

    asyncio.run(move())
    found = [find(url, name, codec=with_key(KEY)) is not None for name in ("s", "t", "u")]
    assert found == [True, False, False]


def test_sessions_written_before_there_was_a_key_are_still_read(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path / 's'}"
    before = register(url, "s")
    assert find(url, "s", codec=with_key(KEY)) == before


def test_another_master_key(tmp_path: Path) -> None:
    url = f"sqlite:{beside(tmp_path)}"
    assert reseal(tmp_path, lambda: KEY, lambda: OTHER_KEY) == 0
    assert not beside(tmp_path).exists()
    before = [register(url, name, codec=with_key(KEY)) for name in ("a", "b")]
    assert reseal(tmp_path, lambda: KEY, lambda: OTHER_KEY) == 2
    assert [find(url, name, codec=with_key(OTHER_KEY)) for name in ("a", "b")] == before
    assert find(url, "a", codec=with_key(KEY)) is None
    assert reseal(tmp_path, lambda: KEY, lambda: OTHER_KEY) == 0


def test_kv_whose_session_is_gone_is_swept(url: str, tmp_path: Path) -> None:
    """After a crash between storing and registering, or when what was written down is lost."""
    who = identity()
    blocks = [make_block(list(range(100 * i, 100 * i + 64))) for i in range(3)]

    async def main() -> None:
        store, metadata = KVStore(tmp_path / "kv", session_owner=url), open_metadata(url)
        manager = ContextCacheManager(metadata, store)
        for i in range(2):
            reference = manager.new_kv_cache_ref()
            store.put(who, blocks[i], session=reference)
            request = expected(session_id=f"s{i}", ttl=99)
            created(await manager.register_session_cache(request, kv_cache_sidecar_ref=reference))
        store.put(who, blocks[2], session=manager.new_kv_cache_ref())
        record = await metadata.get(Key("", "s0"))
        assert record is not None
        await metadata.remove(Key("", "s0"), record)

        assert await manager.sweep_orphans(60) == 0  # they may be about to be registered
        await metadata.put(Key("", "odd"), b"what is this", time.time() + 99)
        assert await manager.sweep_orphans(-60) == 0  # it may be the owner
        await metadata.remove(Key("", "odd"), b"what is this")
        assert await manager.sweep_orphans(-60) == 2
        assert [store.find(who, block.tokens) is not None for block in blocks] == [False, True, False]
        await manager.unregister_session_cache("s1")
        await manager.close()
        store.close()

    asyncio.run(main())


def test_a_session_file_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "s"
    path.parent.mkdir()

    async def main() -> None:
        manager = ContextCacheManager(f"sqlite:{path}")
        created(await manager.register_session_cache(expected(session_id="s")))
        shutil.rmtree(path.parent)
        assert await manager.get_session_metadata("s") is None
        created(await manager.register_session_cache(expected(session_id="s")))
        assert code(await manager.register_session_cache(expected(session_id="s"))) == "session_exists"
        await manager.close()

    asyncio.run(main())
    assert find(f"sqlite:{path}", "s") is not None


@pytest.mark.parametrize("at", [0, 100, 4096])
def test_a_damaged_session_file_is_set_aside(tmp_path: Path, at: int) -> None:
    """Its beginning, its list of tables, or what is in one: found when it is opened, or later."""
    url, path = f"sqlite:{beside(tmp_path)}", beside(tmp_path)
    register(url, "old")
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xa5" * 2000)
    damaged = path.read_bytes()
    assert find(url, "old") is None
    assert (tmp_path / "sessions.sqlite3.damaged").read_bytes() == damaged
    register(url, "new")
    assert find(url, "new") is not None


def test_a_file_that_never_was_a_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("precious " * 1000)
    with pytest.raises(ValueError, match="is not a session database"):
        open_metadata(f"sqlite:{path}")
    assert path.read_text() == "precious " * 1000
