"""The folder of a store: full disks, and traps that others laid in it."""

from __future__ import annotations

import errno
import logging
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mixedkv.store import KVStore
from mixedkv.store.tiers.disk import DiskTier
from support.store_support import identity, make_block

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
    def limited(self: DiskTier, name: str, pieces: Iterable[bytes | memoryview]) -> Iterator[None]:
        if len(self.sizes()) >= n_files:
            raise OSError(errno.ENOSPC, "No space left on device")
        with publish(self, name, pieces):
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
