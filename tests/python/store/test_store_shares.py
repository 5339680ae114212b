"""Several tenants in one folder: nobody takes the place of who holds less."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mixedkv.store import KVStore, Share
from mixedkv.store.entries import TooLargeError
from support.stores.blocks import identity, make_block, put_chain

pytestmark = pytest.mark.full

ANNA, BEN = identity(tenant="anna"), identity(tenant="ben")


def put(store: KVStore, who: object, i: int) -> None:
    store.put(who, make_block(list(range(1000 * i, 1000 * i + 64))))  # type: ignore[arg-type]


def has(store: KVStore, who: object, i: int) -> bool:
    return store.find(who, list(range(1000 * i, 1000 * i + 64))) is not None  # type: ignore[arg-type]


def budget(folder: Path, n: int) -> float:
    """For n entries and a bit."""
    with KVStore(folder / "probe", max_ram_bytes=0) as store:
        put(store, ANNA, 0)
        return (n + 0.5) * store.stats().bytes_disk / 1e9


@pytest.mark.parametrize("eviction", ["lru", "oldest", "gdsf"])
def test_a_tenant_that_stores_much_evicts_its_own(tmp_path: Path, eviction: str) -> None:
    with KVStore(tmp_path / "kv", max_kv_size_gb=budget(tmp_path, 10), eviction=eviction) as store:  # type: ignore[arg-type]
        for i in range(3):
            put(store, ANNA, i)
        for i in range(40):
            put(store, BEN, i)
        assert [has(store, ANNA, i) for i in range(3)] == [True] * 3
        assert [has(store, BEN, i) for i in range(40)] == [False] * 33 + [True] * 7


def test_who_comes_later_gets_half(tmp_path: Path) -> None:
    with KVStore(tmp_path / "kv", max_kv_size_gb=budget(tmp_path, 10)) as store:
        for i in range(20):
            put(store, BEN, i)
        for i in range(20):
            put(store, ANNA, i)
        assert sum(has(store, ANNA, i) for i in range(20)) == 5
        assert sum(has(store, BEN, i) for i in range(20)) == 5


def test_weights_say_how_much(tmp_path: Path) -> None:
    shares = {"anna": Share(weight=1), "ben": Share(weight=4)}
    size = budget(tmp_path, 10)
    with KVStore(tmp_path / "kv", max_kv_size_gb=size, shares=shares.__getitem__) as store:
        for i in range(20):
            put(store, ANNA, i)
            put(store, BEN, i)
        assert sum(has(store, ANNA, i) for i in range(20)) == 2
        assert sum(has(store, BEN, i) for i in range(20)) == 8


def test_a_limit_of_its_own(tmp_path: Path) -> None:
    limit = int(budget(tmp_path, 3) * 1e9)
    with KVStore(tmp_path / "kv", shares=lambda tenant: Share(max_bytes=limit)) as store:
        for i in range(6):
            put(store, ANNA, i)
            put(store, BEN, i)
        for who in (ANNA, BEN):
            assert [has(store, who, i) for i in range(6)] == [False] * 3 + [True] * 3
        with pytest.raises(TooLargeError, match="budget"):
            put_chain(store, ANNA, list(range(90_000, 90_400)), [100, 200, 300, 400])


def test_what_was_not_used_for_a_day_protects_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with KVStore(tmp_path / "kv", max_kv_size_gb=budget(tmp_path, 4)) as store:
        for i in range(2):
            put(store, ANNA, i)
        later = time.time() + 90_000
        monkeypatch.setattr(time, "time", lambda: later)
        for i in range(4):
            put(store, BEN, i)
        assert [has(store, BEN, i) for i in range(4)] == [True] * 4
        assert not has(store, ANNA, 0)


def test_one_tenant_is_plain_lru(tmp_path: Path) -> None:
    """Several models of one tenant share what it has."""
    models = [identity(model=name) for name in "ab"]
    with KVStore(tmp_path / "kv", max_kv_size_gb=budget(tmp_path, 4)) as store:
        for i in range(3):
            put(store, models[0], i)
        for i in range(3):
            put(store, models[1], i)
        assert [has(store, models[0], i) for i in range(3)] == [False, False, True]
        assert [has(store, models[1], i) for i in range(3)] == [True] * 3
