"""2,000 damaged files and indexes: never a crash, never a wrong restore, each a miss with a reason."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from mixedkv.store import KVStore
from mixedkv.store.encryption import HEADER
from mixedkv.store.entry_row import REASONS
from support.stores.blocks import identity, make_block, put_chain, same, stored_match

pytestmark = pytest.mark.full

WHO = identity()
TOKENS = list(range(300, 350))
BLOCK = make_block(TOKENS, kind="q8_0", hot=[0, 1, 48, 49])
OTHER = make_block(TOKENS, kind="q8_0", hot=[0, 1, 48, 49], seed=1)

Damage = Callable[[bytes, random.Random], bytes]


def header_of(data: bytes) -> tuple[dict, bytes]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def signed(header: dict, tensors: bytes) -> bytes:
    """A file with the right checksum for whatever it says."""
    header["__metadata__"]["checksum"] = "0" * 64
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = len(text).to_bytes(8, "little") + text + tensors
    return data.replace(b"0" * 64, hashlib.sha256(data).hexdigest().encode(), 1)


def truncated(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.choice([0, 1, 7, 8, 9, rng.randrange(len(data)), len(data) - 1])]


def bit_flips(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for i in {rng.randrange(len(data)) for _ in range(rng.choice([1, 1, 2, 50]))}:
        changed[i] ^= 1 << rng.randrange(8)
    return bytes(changed)


def header_flips(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    changed[rng.randrange(min(len(data), 3000))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def overwritten(data: bytes, rng: random.Random) -> bytes:
    at, n = rng.randrange(len(data)), rng.randrange(1, 5000)
    other = data[:at] + rng.choice([bytes(n), b"\xff" * n, rng.randbytes(n)]) + data[at + n :]
    return other if other != data else data + b"\0"


def grown(data: bytes, rng: random.Random) -> bytes:
    return data + rng.randbytes(rng.choice([1, 8, 4096]))


def swapped_parts(data: bytes, rng: random.Random) -> bytes:
    n = rng.randrange(1, 200)
    a, b = sorted(rng.sample(range(len(data) - n), 2))
    other = data[:a] + data[b : b + n] + data[a + n : b] + data[a : a + n] + data[b + n :]
    return other if b >= a + n and other != data else data[::-1]


def huge_sizes(data: bytes, rng: random.Random) -> bytes:
    size = rng.choice([2**24 + 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1])
    if data[:8] == b"MKVCRYPT":
        return data[: HEADER.size - 8] + size.to_bytes(8, "little") + data[HEADER.size :]
    return size.to_bytes(8, "little") + data[8:]


def forged(data: bytes, rng: random.Random) -> bytes:
    """Whole, with the right checksum, and not what a block can be, or not the one that is wanted."""
    header, tensors = header_of(data)
    meta, table = header["__metadata__"], {k: v for k, v in header.items() if k != "__metadata__"}
    name = rng.choice(sorted(table))
    described = json.loads(meta["block"])
    layer = rng.choice(described["groups"][0]["layers"])
    number = rng.choice([-1, 1, 2, 3, 2**20, 2**31, 2**40, 2**63, 2**64, 1.5, True, None, "x", [], {}])
    match rng.randrange(8):
        case 0:
            meta["version"] = rng.choice(["0", "", "3", "999999", "1.0"])
        case 1:
            meta["identity"] = rng.choice(["", "00" * 32, identity("q8_0").digest.hex()])
        case 2:
            meta["entry"] = rng.randbytes(16).hex()
        case 3:
            table[name]["shape"] = rng.choice([[number], [number, 68], [2**39, 2**39], number])
        case 4:
            table[name]["data_offsets"] = rng.choice([[0, number], [number, 2**40], number, [8, 0]])
        case 5:
            # A rotation of 1 or 2 could be: against who writes right checksums only encryption helps.
            field = rng.choice(sorted(layer.keys() - {"rotation_k", "rotation_v", "n_head_kv"}))
            layer[field] = number
        case 6:
            described[rng.choice(["p0", "p1", "groups"])] = number
        case 7:
            tokens = table["tokens"]["data_offsets"][0]
            tensors = tensors[:tokens] + rng.randbytes(4) + tensors[tokens + 4 :]
    meta["block"] = json.dumps(described, separators=(",", ":"))
    return signed({"__metadata__": meta, **table}, tensors)


PLAIN: dict[str, tuple[Damage, int]] = {
    "truncated": (truncated, 200),
    "bit flips": (bit_flips, 250),
    "header flips": (header_flips, 250),
    "overwritten": (overwritten, 150),
    "grown": (grown, 50),
    "swapped parts": (swapped_parts, 150),
    "huge sizes": (huge_sizes, 50),
    "forged": (forged, 400),
}
ENCRYPTED: dict[str, tuple[Damage, int]] = {
    "truncated": (truncated, 100),
    "bit flips": (bit_flips, 150),
    "overwritten": (overwritten, 100),
    "grown": (grown, 50),
    "swapped parts": (swapped_parts, 80),
    "huge sizes": (huge_sizes, 20),
}


def test_there_are_2000() -> None:
    assert sum(n for _, n in [*PLAIN.values(), *ENCRYPTED.values()]) == 2000


CASES = [
    *(pytest.param(name, None, *case, id=f"plain {name}") for name, case in PLAIN.items()),
    *(pytest.param(name, b"k" * 32, *case, id=f"encrypted {name}") for name, case in ENCRYPTED.items()),
]


@pytest.mark.parametrize(("name", "key", "damage", "times"), CASES)
def test_a_damaged_file_is_a_miss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, key: bytes | None, damage: Damage, times: int
) -> None:
    caplog.set_level(logging.CRITICAL)
    rng = random.Random(name)
    with fast_store(tmp_path, key) as store:
        for n in range(times):
            entry = store.put(WHO, BLOCK)
            (path,) = tmp_path.rglob(f"{entry}.*")
            whole = path.read_bytes()
            while (damaged := damage(whole, rng)) == whole:
                pass
            path.write_bytes(damaged)
            match = stored_match(store, WHO, TOKENS)
            assert store.read(match) is None, f"{name} {n} was read"
            assert store.find(WHO, TOKENS) is None  # it is gone, so that it can be stored again
            assert not path.exists()
        store.put(WHO, BLOCK)
        (block,) = store.read(store.find(WHO, TOKENS)) or []  # type: ignore[arg-type]
        assert same(block, BLOCK)
        misses = Counter(store.stats().misses)
    assert misses.pop("unknown") == times
    assert misses.total() == times
    assert misses.keys() <= set(REASONS)
    expected = {"forged": {"damaged", "version", "identity", "tokens"}}
    assert misses.keys() <= expected.get(name, {"damaged", "version", "identity"})


def fast_store(folder: Path, key: bytes | None = None) -> KVStore:
    return KVStore(folder, max_ram_bytes=0, key=None if key is None else lambda: key)


def test_files_of_two_entries_swapped(tmp_path: Path) -> None:
    for key in (None, b"k" * 32):
        with fast_store(tmp_path / str(key), key) as store:
            a, b = store.put(WHO, BLOCK), store.put(identity("q8_0"), OTHER)
            (path_a,), (path_b,) = (tmp_path.rglob(f"{entry}.*") for entry in (a, b))
            path_a.rename(tmp_path / "x")
            path_b.rename(path_a)
            (tmp_path / "x").rename(path_b)
            for who in (WHO, identity("q8_0")):
                assert store.read(store.find(who, TOKENS)) is None  # type: ignore[arg-type]
            assert store.stats().misses == {"identity" if key is None else "damaged": 2}


def test_a_file_that_is_something_else(tmp_path: Path) -> None:
    def make_folder(path: Path) -> None:
        path.mkdir()

    def make_link(path: Path) -> None:
        path.symlink_to(path)

    def make_unreadable(path: Path) -> None:
        path.symlink_to("/proc/self/mem")

    def make_pipe(path: Path) -> None:
        os.mkfifo(path)

    def make_sparse(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(1 << 39)

    for make in (make_folder, make_link, make_unreadable, make_pipe, make_sparse):
        with fast_store(tmp_path / make.__name__) as store:
            entry = store.put(WHO, BLOCK)
            (path,) = tmp_path.rglob(f"{entry}.*")
            path.unlink()
            make(path)
            assert store.read(store.find(WHO, TOKENS)) is None  # type: ignore[arg-type]
            assert store.stats().misses.keys() <= {"damaged", "missing"}


def test_what_builds_on_a_damaged_entry_goes_with_it(tmp_path: Path) -> None:
    with fast_store(tmp_path) as store:
        entries = put_chain(store, WHO, TOKENS, [10, 20, 30])
        (path,) = tmp_path.rglob(f"{entries[1]}.*")
        path.write_bytes(b"")
        assert store.read(store.find(WHO, TOKENS)) is None  # type: ignore[arg-type]
        assert [entry.id for entry in store.entries()] == entries[:1]
        assert len(list(tmp_path.rglob("*.safetensors"))) == 1
        put_chain(store, WHO, TOKENS, [10, 20, 30])
        assert stored_match(store, WHO, TOKENS).n_tokens == 30


def test_verify_finds_damage(tmp_path: Path) -> None:
    with fast_store(tmp_path) as store:
        entries = [store.put(WHO, make_block([i, *TOKENS])) for i in range(4)]
        for entry in entries[:2]:
            (path,) = tmp_path.rglob(f"{entry}.*")
            path.write_bytes(path.read_bytes()[:-1] + b"\x55")
        report = store.verify()
        assert report.n_whole == 2
        assert report.damaged.keys() == set(entries[:2])
        assert all(reason == "damaged: its checksum does not match" for reason in report.damaged.values())
        assert {entry.id for entry in store.entries()} == set(entries[2:])


# --- the index ---


def change_index(folder: Path, statement: str, *values: object, rows: int = 1) -> None:
    with sqlite3.connect(folder / "v1" / "index.sqlite3") as db:
        assert db.execute(statement, values).rowcount == rows
    db.close()


@pytest.mark.parametrize("key", [None, b"k" * 32])
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("tokens", b""),
        ("tokens", bytes(200)),
        ("rows", "["),
        ("rows", "[[[[0,50]]]]"),
        ("rows", '[["ab","cd"]]'),
        ("rows", "[[[[50,0]],[]]]"),
        ("identity", bytes(32)),
        ("parent", "ab" * 16),
        ("p0", 5),
        ("p1", 2**40),
        ("p1", 49),
        ("p0", "x"),
        ("p1", -5),
        ("nbytes", "x"),
        ("nbytes", -1),
        ("rows", "[[[[0,1e400]],[]]]"),
        ("rows", "[[[[0,50.5]],[]]]"),
        ("rows", b"[]"),
        ("label", b"x"),
        ("parent", 7),
        ("used", "x"),
        ("content", b"x"),
        ("id", "../../x"),
        ("id", b"x"),
    ],
)
def test_a_damaged_row(tmp_path: Path, key: bytes | None, column: str, value: object) -> None:
    with fast_store(tmp_path, key) as store:
        store.put(WHO, BLOCK)
        change_index(tmp_path, f"UPDATE entries SET {column} = ?", value)
        match = store.find(WHO, TOKENS)
        assert match is None or store.read(match) is None
        assert store.stats().n_misses == 1


@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_rows_of_another_entry_are_not_believed(tmp_path: Path, key: bytes | None) -> None:
    """Tokens in the index only propose: those in the file decide."""
    with fast_store(tmp_path, key) as store:
        store.put(WHO, BLOCK)
        tokens = [1, *TOKENS[1:]]
        change_index(tmp_path, "UPDATE entries SET tokens = ?", make_block(tokens).tokens.tobytes())
        assert store.find(WHO, TOKENS) is None or key
        if (match := store.find(WHO, tokens)) is not None:
            assert store.read(match) is None
            assert store.stats().misses["tokens"] == 1


@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_a_row_moved_behind_other_tokens(tmp_path: Path, key: bytes | None) -> None:
    """An entry is only used behind the tokens it was computed behind, whatever the index says."""
    a, b, rest = (list(range(i, i + 64)) for i in (1000, 2000, 3000))
    with fast_store(tmp_path, key) as store:
        first, second = store.put(WHO, make_block(a)), store.put(WHO, make_block(b, seed=1))
        entry = store.put(WHO, make_block(rest, 64), store.find(WHO, a))
        change_index(tmp_path, "UPDATE entries SET parent = ? WHERE id = ?", second, entry)
        copied = "INSERT INTO blocks SELECT hash, ? FROM blocks WHERE entry = ?"
        change_index(tmp_path, copied, entry, second, rows=3)
        match = stored_match(store, WHO, [*b, *rest])
        assert [link.entry for link in match.links] == [second]
        assert {entry.id for entry in store.entries()} == {first, second}


@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_rows_that_an_entry_does_not_have(tmp_path: Path, key: bytes | None) -> None:
    who = identity("mixed:threshold=32,group=16,sinks=0")
    rows = '{"groups":[[[[0,50]],[[0,50]]]],"served":[]}'
    with fast_store(tmp_path, key) as store:
        store.put(who, make_block(TOKENS, kind="q4_0", hot=[]))
        change_index(tmp_path, f"UPDATE entries SET rows = '{rows}'")
        match = store.find(who, TOKENS, exact_only=True)
        assert match is None or store.read(match) is None
        assert store.stats().misses == {"damaged": 1}


def test_a_folder_with_the_name_of_an_entry(tmp_path: Path) -> None:
    with fast_store(tmp_path) as store:
        entry = store.put(WHO, BLOCK)
    (path,) = tmp_path.rglob(f"{entry}.*")
    path.unlink()
    path.mkdir()
    with fast_store(tmp_path) as store:
        assert store.entries() == []


@pytest.mark.parametrize("content", [b"", b"no database", os.urandom(8192)], ids=["empty", "text", "random"])
def test_a_damaged_index_is_an_empty_store(tmp_path: Path, content: bytes) -> None:
    with fast_store(tmp_path) as store:
        store.put(WHO, BLOCK)
    (tmp_path / "v1" / "index.sqlite3").write_bytes(content)
    with fast_store(tmp_path) as store:
        assert store.find(WHO, TOKENS) is None
        assert list(tmp_path.rglob("*.safetensors")) == []
        store.put(WHO, BLOCK)
        assert store.read(store.find(WHO, TOKENS)) is not None  # type: ignore[arg-type]


def test_an_index_that_breaks_while_it_is_used(tmp_path: Path) -> None:
    with fast_store(tmp_path) as store:
        store.put(WHO, BLOCK)
        match = stored_match(store, WHO, TOKENS)
        change_index(tmp_path, "DROP TABLE blocks", rows=-1)
        change_index(tmp_path, "ALTER TABLE entries RENAME TO gone", rows=-1)
        assert store.find(WHO, TOKENS) is None
        assert store.read(match) is None
        assert store._tally.stats()["misses"] == {"index": 2}
        for call in (lambda: store.put(WHO, OTHER), store.entries, store.stats, store.gc, store.verify):
            with pytest.raises(OSError, match="index"):
                call()
