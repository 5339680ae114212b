"""Budgets: what leaves, in which order, and that nothing is left of it."""

from __future__ import annotations

import errno
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mixedkv.kv.block import KVBlock
from mixedkv.store import KVStore, Share
from mixedkv.store.entries import RamTier
from mixedkv.store.eviction import Eviction
from mixedkv.store.tiers.disk import DiskTier
from support.stores.blocks import identity, make_block, put_chain, same, stored_match

pytestmark = pytest.mark.core

WHO = identity()
N = 64


def tokens(i: int) -> list[int]:
    return [i, *range(N - 1)]


def block(i: int) -> KVBlock:
    return make_block(tokens(i))


SIZE = block(0).nbytes


def stored(store: KVStore) -> set[int]:
    """Which of the sequences are there whole."""
    matches = {i: store.find(WHO, tokens(i)) for i in range(10)}
    return {i for i, match in matches.items() if match and match.n_tokens == N}


def read(store: KVStore, i: int) -> None:
    match = stored_match(store, WHO, tokens(i))
    assert same((store.read(match) or [])[0], block(i))


def file_size(tmp_path: Path) -> int:
    with KVStore(tmp_path / "one") as store:
        store.put(WHO, block(0))
        return store.stats().bytes_disk


@pytest.mark.parametrize("where", ["memory", "folder"])
@pytest.mark.parametrize(
    ("eviction", "left"), [("lru", {0, 2, 3}), ("oldest", {1, 2, 3}), ("gdsf", {0, 2, 3})]
)
def test_order(tmp_path: Path, where: str, eviction: str, left: set[int]) -> None:
    size = SIZE if where == "memory" else file_size(tmp_path)
    budget = {"max_ram_bytes": 3 * SIZE + 10, "max_kv_size_gb": (3 * size + 10) / 1e9}
    folder = None if where == "memory" else tmp_path / "kv"
    with KVStore(folder, eviction=eviction, **budget) as store:  # type: ignore[arg-type]
        for i in range(3):
            store.put(WHO, block(i))
        read(store, 0)
        store.put(WHO, block(3))
        assert stored(store) == left
        assert store.stats().n_evicted == 1
        if folder:
            assert len(list(folder.rglob("*.safetensors"))) == 3
        assert store.verify().n_whole == 3


def test_what_is_used_often_outlives_what_was_used_last(tmp_path: Path) -> None:
    budget = {"max_ram_bytes": 3 * SIZE + 10}
    for eviction, left in (("lru", {1, 2, 3}), ("gdsf", {0, 2, 3})):
        with KVStore(None, eviction=eviction, **budget) as store:  # type: ignore[arg-type]
            for i in range(3):
                store.put(WHO, block(i))
            for i in (0, 0, 0, 1, 2):
                read(store, i)
            store.put(WHO, block(3))
            assert stored(store) == left, eviction


@pytest.mark.parametrize("because_of", ["budget", "share", "full disk"])
def test_what_was_used_often_long_ago_leaves_at_last(
    tmp_path: Path, because_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What leaves raises the worth of what comes: without that, old favourites would stay for ever."""
    room = int(2.5 * file_size(tmp_path))
    shares = (lambda tenant: Share(max_bytes=room)) if because_of == "share" else None
    if because_of == "full disk":
        limit_disk(monkeypatch, room)
    budget = room / 1e9 if because_of == "budget" else 1
    with KVStore(tmp_path / "kv", eviction="gdsf", max_kv_size_gb=budget, shares=shares) as store:
        store.put(WHO, block(0))
        for _ in range(3):
            read(store, 0)
        for i in range(1, 10):
            store.put(WHO, block(i))
            read(store, i)
            if i > 1:
                store.put(WHO, block(i - 1))  # two new ones by turns
        assert 0 not in stored(store)


def limit_disk(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    publish = DiskTier.publish

    @contextmanager
    def limited(
        self: DiskTier, name: str, pieces: Iterable[bytes | memoryview], durable: bool = True
    ) -> Iterator[None]:
        parts = list(pieces)
        if sum(self.sizes().values()) + sum(map(len, parts)) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        with publish(self, name, parts, durable):
            yield

    monkeypatch.setattr(DiskTier, "publish", limited)


def test_use_outlives_the_process(tmp_path: Path) -> None:
    size = file_size(tmp_path)
    budget = {"max_ram_bytes": 0, "max_kv_size_gb": (2 * size + 10) / 1e9}
    with KVStore(tmp_path / "kv", **budget) as store:
        store.put(WHO, block(0))
        store.put(WHO, block(1))
        read(store, 0)
    with KVStore(tmp_path / "kv", **budget) as store:
        store.put(WHO, block(2))
        assert stored(store) == {0, 2}


def age(folder: Path, seconds: float, *entries: str) -> None:
    """As if entries had been used for the last time so long ago; all of them if none is named."""
    with sqlite3.connect(folder / "v1" / "index.sqlite3") as db:
        chosen = entries or [entry for (entry,) in db.execute("SELECT id FROM entries")]
        db.executemany("UPDATE entries SET used = used - ? WHERE id = ?", [(seconds, e) for e in chosen])


def test_what_was_not_used_for_long_is_removed_when_the_store_is_opened(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with KVStore(folder) as store:
        for i in range(3):
            store.put(WHO, block(i))
    age(folder, 3600)
    with KVStore(folder, max_age_seconds=7200) as store:
        read(store, 1)
        assert store.stats().n_expired == 0
    with KVStore(folder, max_age_seconds=1800) as store:
        assert stored(store) == {1}
        assert store.stats().n_expired == 2
        assert len(list(folder.rglob("*.safetensors"))) == 1
        age(folder, 3600)
        assert store.gc().n_expired == 1
        assert stored(store) == set()


def test_what_a_younger_entry_builds_on_stays(tmp_path: Path) -> None:
    folder, chain = tmp_path / "kv", list(range(96))
    with KVStore(folder) as store:
        entries = put_chain(store, WHO, chain, [32, 64, 96])
    age(folder, 3600, entries[0], entries[2])
    with KVStore(folder, max_age_seconds=1800) as store:
        assert {entry.id for entry in store.entries()} == set(entries[:2])
    age(folder, 3600, entries[1])
    with KVStore(folder, max_age_seconds=1800) as store:
        assert store.entries() == []


def test_what_others_build_on_leaves_after_them(tmp_path: Path) -> None:
    chain = list(range(1000, 1096))
    with KVStore(tmp_path / "kv") as store:
        entries = put_chain(store, WHO, chain, [32, 64, 96])
        sizes = {entry.id: entry.nbytes for entry in store.entries()}
    for left in (2, 1, 0):
        budget = sum(sizes[entry] for entry in entries[:left])
        with KVStore(tmp_path / "kv", max_kv_size_gb=budget / 1e9) as store:
            assert store.gc().n_evicted == 1
            match = store.find(WHO, chain)
            assert (match.n_tokens if match else 0) == 32 * left
            assert {entry.id for entry in store.entries()} == set(entries[:left])


def test_a_new_entry_never_evicts_what_it_builds_on(tmp_path: Path) -> None:
    with KVStore(tmp_path / "kv") as store:
        put_chain(store, WHO, list(range(96)), [32, 64, 96])
        size = store.stats().bytes_disk
    with KVStore(tmp_path / "other", max_kv_size_gb=(size + 10) / 1e9) as store:
        store.put(WHO, block(5))
        put_chain(store, WHO, list(range(96)), [32, 64, 96])
        assert stored_match(store, WHO, list(range(96))).n_tokens == 96
        assert stored(store) == set()


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_an_entry_larger_than_the_budget(tmp_path: Path, where: str) -> None:
    folder = None if where == "memory" else tmp_path / "kv"
    with KVStore(folder, max_ram_bytes=SIZE - 1, max_kv_size_gb=1e-6) as store:
        with pytest.raises(ValueError, match="more than the budget"):
            store.put(WHO, block(0))
        assert store.stats().n_entries == store.stats().n_ram == 0
        assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_a_chain_larger_than_the_budget(tmp_path: Path, where: str) -> None:
    """A conversation that grows beyond it keeps its beginning; nothing else has to leave for the attempt."""
    size = SIZE if where == "memory" else file_size(tmp_path)
    folder = None if where == "memory" else tmp_path / "kv"
    chain = list(range(1000, 1000 + 8 * N))
    with KVStore(folder, max_ram_bytes=4 * size, max_kv_size_gb=4 * size / 1e9) as store:
        with pytest.raises(ValueError, match="more than the budget"):
            put_chain(store, WHO, chain, list(range(N, 8 * N + 1, N)))
        match = stored_match(store, WHO, chain)
        assert store.stats().n_entries == match.n_tokens // N == len(match.links) >= 3
        assert store.stats().n_evicted == store.gc().n_evicted == 0
        store.put(WHO, block(0))
        store.put(WHO, block(1))
        found = stored_match(store, WHO, chain)
        assert store.read(found) is not None


def test_memory_above_the_folder(tmp_path: Path) -> None:
    with KVStore(tmp_path / "kv", max_ram_bytes=2 * SIZE) as store:
        for i in range(4):
            store.put(WHO, block(i))
        assert (store.stats().n_ram, store.stats().bytes_ram, store.stats().n_entries) == (2, 2 * SIZE, 4)
        for i in (3, 2, 0, 2):
            read(store, i)
        assert store.stats().hits == {"ram": 3, "disk": 1}
    with KVStore(tmp_path / "kv", max_ram_bytes=0) as store:
        read(store, 0)
        read(store, 0)
        assert store.stats().hits == {"disk": 2}
        assert store.stats().n_ram == 0


@pytest.mark.parametrize(("eviction", "left"), [("lru", "cad"), ("oldest", "bcd"), ("gdsf", "abd")])
def test_memory_above_a_folder_has_the_same_order(eviction: Eviction, left: str) -> None:
    ram = RamTier(3 * SIZE, eviction)
    for i, name in enumerate("abc"):
        ram.put(name, block(i))
    for name in "aabbca":
        assert ram.get(name) is not None
    ram.put("d", block(3))
    assert {name for name in "abcd" if name in ram} == set(left)


def test_ram_tier() -> None:
    ram = RamTier(2 * SIZE)
    for name in "aba":
        ram.put(name, block(0))
    ram.put("c", block(1))  # b was used before a
    assert [name in ram for name in "abc"] == [True, False, True]
    assert ram.n_bytes == 2 * SIZE
    ram.put("d", make_block(list(range(10 * N))))
    assert "d" not in ram
    ram.keep_only({"c"})
    ram.remove("x")
    assert (len(ram), ram.n_bytes) == (1, SIZE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eviction": "newest"}, "eviction='newest': use one of lru, oldest"),
        ({"max_ram_bytes": -1}, "max_ram_bytes=-1"),
        ({"max_kv_size_gb": "10 of them"}, "max_kv_size_gb='10 of them'"),
        ({"max_kv_size_gb": float("nan")}, "max_kv_size_gb=nan"),
        ({"max_ram_bytes": True}, "max_ram_bytes=True"),
        ({"max_age_seconds": "30d"}, "max_age_seconds='30d'"),
    ],
)
def test_settings_that_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVStore(None, **options)


def test_evicted_between_finding_and_reading(tmp_path: Path) -> None:
    with KVStore(tmp_path / "kv", max_ram_bytes=0) as store:
        entry = store.put(WHO, block(0))
        match = stored_match(store, WHO, tokens(0))
        with KVStore(tmp_path / "kv", max_kv_size_gb=0) as other:
            assert other.gc().n_evicted == 1
        assert store.read(match) is None
        assert store.stats().misses == {"missing": 1}
        assert store.put(WHO, block(0)) != entry
        read(store, 0)


def test_threads_share_a_store(tmp_path: Path) -> None:
    """Writers, readers and a budget that evicts all the while: what is read is always right."""
    size = file_size(tmp_path)
    failures: list[BaseException] = []
    with KVStore(tmp_path / "kv", max_ram_bytes=2 * SIZE, max_kv_size_gb=5 * size / 1e9) as store:

        def work(seed: int) -> None:
            try:
                for n in range(30):
                    i = (seed * 7 + n * 3) % 10
                    match = store.find(WHO, tokens(i))
                    if match is None or match.n_tokens < N:
                        store.put(WHO, block(i))
                    elif (blocks := store.read(match)) is not None:
                        assert same(blocks[0], block(i))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert set(store.stats().misses) <= {"unknown", "missing"}
        assert store.stats().n_entries <= 5
        assert store.verify().damaged == {}
