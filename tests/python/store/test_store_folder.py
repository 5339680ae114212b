"""The folder of a store: full disks, and traps that others laid in it."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mixedkv.sessions.manager import open_metadata
from mixedkv.sessions.metadata import beside
from mixedkv.store import KVStore
from mixedkv.store.tiers.disk import DiskTier, FullDisk
from support.stores.blocks import identity, make_block, stored_match

pytestmark = pytest.mark.full

WHO = identity()


@pytest.mark.parametrize("name", ["lock", "index.sqlite3"])
def test_no_link_is_followed(tmp_path: Path, name: str) -> None:
    victim, root = tmp_path / "victim", tmp_path / "kv" / "v1"
    victim.write_text("precious")
    root.mkdir(parents=True, mode=0o700)
    (root / name).symlink_to(victim)
    with pytest.raises(OSError, match="it is a link"):
        KVStore(tmp_path / "kv")
    assert victim.read_text() == "precious"


def test_nobody_else_reads_the_files_or_writes_to_the_folder(tmp_path: Path) -> None:
    with KVStore(tmp_path) as store:
        store.put(WHO, make_block(list(range(64))))
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "v1").iterdir()}
    assert modes.keys() >= {"lock", "index.sqlite3", "index.sqlite3-wal", "entries"}
    assert {modes.pop("entries")} == {0o700}
    assert set(modes.values()) == {0o600}
    (tmp_path / "v1").chmod(0o777)
    with pytest.raises(PermissionError, match=r"can be written by others \(777\): chmod 700 it"):
        KVStore(tmp_path)


def test_a_full_disk_evicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever fills it: new entries take the place of old ones, and the log says so once."""
    publish, n_files = DiskTier.publish, 4

    @contextmanager
    def limited(
        self: DiskTier, name: str, pieces: Iterable[bytes | memoryview], durable: bool = True
    ) -> Iterator[None]:
        if len(self.sizes()) >= n_files:
            raise OSError(errno.ENOSPC, "No space left on device")
        with publish(self, name, pieces, durable):
            yield

    monkeypatch.setattr(DiskTier, "publish", limited)
    blocks = [make_block(list(range(1000 * i, 1000 * i + 64))) for i in range(20)]
    with KVStore(tmp_path, max_ram_bytes=0) as store, caplog.at_level(logging.WARNING):
        for block in blocks:
            store.put(WHO, block)
        assert store.stats().n_entries == n_files
        assert store.stats().n_evicted == 16
        assert store.find(WHO, blocks[-1].tokens) is not None
        assert store.find(WHO, blocks[0].tokens) is None
        n_files = 0
        with pytest.raises(OSError, match="No space left"):
            store.put(WHO, make_block(list(range(70))))
    assert len([record for record in caplog.records if "disk is full" in record.message]) == 1


def test_a_disk_that_others_have_filled_does_not_cost_all_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    @contextmanager
    def full(
        self: DiskTier, name: str, pieces: Iterable[bytes | memoryview], durable: bool = True
    ) -> Iterator[None]:
        tries.append(name)
        raise OSError(errno.ENOSPC, "No space left on device")
        yield

    with KVStore(tmp_path, max_ram_bytes=0) as store, caplog.at_level(logging.WARNING):
        for i in range(30):
            store.put(WHO, make_block(list(range(1000 * i, 1000 * i + 64))))
        monkeypatch.setattr(DiskTier, "publish", full)
        for i in range(20):
            with pytest.raises(OSError, match=r"No space left|nothing is stored for"):
                store.put(WHO, make_block(list(range(99_000 + i, 99_064 + i))))
        assert store.stats().n_entries >= 15
        assert len(tries) < 20
    assert len(caplog.records) == 1


def is_waiting(disk: FullDisk) -> bool:
    try:
        disk.check()
    except OSError as error:
        return error.errno == errno.ENOSPC
    return False


def test_how_long_a_full_disk_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    disk = FullDisk(lambda: now)
    waits = []
    for _ in range(12):
        disk.check()
        disk.failed()
        began = now
        while is_waiting(disk):
            now += 0.5
        waits.append(now - began)
    assert waits[:4] == [1, 2, 4, 8]
    assert max(waits) == 300
    assert len(caplog.records) == 1
    disk.succeeded()
    disk.failed()
    assert len(caplog.records) == 2


def test_a_folder_that_was_deleted_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, block = tmp_path / "kv", make_block(list(range(64)))
    with KVStore(folder) as store:
        store.put(WHO, block)
        shutil.rmtree(folder)
        assert store.find(WHO, block.tokens) is None
        store.put(WHO, block)
        shutil.rmtree(folder)
        store.put(WHO, block, session="s")  # without looking first
        assert store.find(WHO, block.tokens) is not None
        assert store.remove(session="s") == 1
        store.put(WHO, block)
        shutil.rmtree(folder / "v1" / "entries")
        store.put(WHO, make_block(list(range(500, 600))))
    assert len([record for record in caplog.records if "was deleted" in record.message]) == 2
    with KVStore(folder) as store:
        match = stored_match(store, WHO, list(range(500, 600)))
        assert store.read(match)


def test_a_folder_that_cannot_be_made_again_is_an_error_each_time(tmp_path: Path) -> None:
    folder, block = tmp_path / "a" / "kv", make_block(list(range(64)))
    with KVStore(folder) as store:
        store.put(WHO, block)
        shutil.rmtree(tmp_path / "a")
        (tmp_path / "a").write_text("a file")
        for _ in range(2):
            assert store.find(WHO, block.tokens) is None
            with pytest.raises(OSError, match="a"):
                store.put(WHO, block)
        (tmp_path / "a").unlink()
        store.put(WHO, block)
        assert store.find(WHO, block.tokens) is not None


def test_the_folder_itself_is_nobody_elses_to_write_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match=r"can be written by others \(777\): chmod 700 it"):
        KVStore(tmp_path)
    with pytest.raises(OSError, match=r"can be written by others \(777\): chmod 700 it"):
        open_metadata(f"sqlite:{beside(tmp_path)}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.needs("root")
@pytest.mark.parametrize("name", ["lock", "index.sqlite3", "sessions.sqlite3", "entries", "v1", ""])
def test_nothing_of_another_user_is_used(tmp_path: Path, name: str) -> None:
    root = tmp_path / "kv"
    with KVStore(root) as store:
        store.put(WHO, make_block(list(range(64))))
    path = {"": root, "v1": root / "v1", "sessions.sqlite3": root / name}.get(name, root / "v1" / name)
    path.touch()
    os.chown(path, 65534, 65534)
    with pytest.raises(OSError, match="belongs to another user"):  # noqa: PT012
        KVStore(root).close()
        open_metadata(f"sqlite:{beside(root)}")


@pytest.mark.needs("root")
def test_an_entry_of_another_user_is_not_read(tmp_path: Path) -> None:
    with KVStore(tmp_path) as store:
        store.put(WHO, make_block(list(range(64))))
    (entry,) = (tmp_path / "v1" / "entries").iterdir()
    os.chown(entry, 65534, 65534)
    with KVStore(tmp_path) as store:
        assert [*store.verify().damaged.values()] == ["damaged: its file belongs to another user"]
