"""A store with a master key: nothing in the folder can be read, and what is removed never again."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from mixedkv.store import KVStore, key_from_file, rekey
from mixedkv.store.encryption import KeyCipher, decrypt
from mixedkv.store.entry_row import EntryError
from mixedkv.store.index import Index
from mixedkv.store.lookup import key_context
from support.stores.blocks import identity, make_block, put_chain, same, stored_match

pytestmark = pytest.mark.full

WHO = identity(tenant="secret-tenant")
TOKENS = list(range(70_000, 70_100))
BLOCK = make_block(TOKENS, hot=[1, 2, 3])
KEY, OTHER_KEY = b"k" * 32, b"o" * 32


def open_store(folder: Path, key: bytes | None = KEY, **options: int) -> KVStore:
    return KVStore(folder, max_ram_bytes=0, key=key and (lambda: key), check_key=False, **options)


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def readable(folder: Path) -> list[bool]:
    """Whether tokens, rows, the session and the tenant can be read in a folder's files as they are."""
    data = everything(folder)
    rows = BLOCK.groups[0].layers[0]
    expected = (
        BLOCK.tokens[:8].tobytes(),
        rows.k[0].tobytes(),
        rows.v_hot[0].tobytes(),
        b"chat-7",
        b"secret",
    )
    return [text in data for text in expected]


def test_nothing_can_be_read_without_the_key(tmp_path: Path) -> None:
    for key, expected in ((None, [True] * 3 + [False] * 2), (KEY, [False] * 5)):
        folder = tmp_path / str(key)
        with open_store(folder, key) as store:
            store.put(WHO, BLOCK, session="chat-7")
            assert readable(folder) == expected
        assert readable(folder) == expected


def test_hashes_are_keyed(tmp_path: Path) -> None:
    """Otherwise who has the folder could try prompts against it."""
    hashes = []
    for key in (KEY, OTHER_KEY, None):
        with open_store(tmp_path / str(key), key) as store:
            store.put(WHO, BLOCK, session="chat")
        with sqlite3.connect(tmp_path / str(key) / "v1" / "index.sqlite3") as db:
            found = db.execute("SELECT hash FROM blocks UNION SELECT session FROM sessions").fetchall()
        hashes.append({value for (value,) in found})
        db.close()
    assert all(len(found) == 5 for found in hashes)
    assert not (hashes[0] & hashes[1] | hashes[0] & hashes[2])


def test_the_folder_is_for_its_owner(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv", None) as store:
        store.put(WHO, BLOCK)
    assert (tmp_path / "kv" / "v1").stat().st_mode & 0o077 == 0


def test_another_process_reads_it_with_the_key_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY.hex())
    (tmp_path / "key").chmod(0o600)
    with open_store(tmp_path / "kv") as store:
        put_chain(store, WHO, TOKENS, [30, 100])
    with KVStore(tmp_path / "kv", key=key_from_file(tmp_path / "key")) as store:
        match = stored_match(store, WHO, TOKENS)
        blocks = store.read(match) or []
        assert same(blocks[0], make_block(TOKENS[:30]))
        assert same(blocks[1], make_block(TOKENS[30:], 30))


@pytest.mark.parametrize(("first", "second"), [(KEY, OTHER_KEY), (KEY, None), (None, KEY)])
def test_another_key_is_a_miss_and_harms_nothing(
    tmp_path: Path, first: bytes | None, second: bytes | None
) -> None:
    with open_store(tmp_path, first) as store:
        store.put(WHO, BLOCK)
    with open_store(tmp_path, second) as store:
        assert store.find(WHO, TOKENS) is None
        assert store.stats().misses == {"key": 1}
        report = store.verify()
        assert (report.n_whole, len(report.unreadable)) == (0, 1)
        store.put(WHO, BLOCK)  # each has its own
        assert len(store.entries()) == 2
        assert same((store.read(store.find(WHO, TOKENS)) or [])[0], BLOCK)  # type: ignore[arg-type]
    with open_store(tmp_path, first) as store:
        assert same((store.read(store.find(WHO, TOKENS)) or [])[0], BLOCK)  # type: ignore[arg-type]


def test_removing_destroys_the_key(tmp_path: Path) -> None:
    """A copy of the file, taken before, is of no use after."""
    with open_store(tmp_path) as store:
        entry = store.put(WHO, BLOCK)
        (path,) = tmp_path.rglob(f"{entry}.*")
        copy = tmp_path / "copy"
        copy.write_bytes(path.read_bytes())
        with sqlite3.connect(tmp_path / "v1" / "index.sqlite3") as db:
            ((wrapped,),) = db.execute("SELECT key FROM entries").fetchall()
        db.close()
        assert wrapped in everything(tmp_path)
        assert store.remove(entry) == 1
        assert wrapped not in everything(tmp_path)
        assert not path.exists()
        store.put(WHO, BLOCK)
        with sqlite3.connect(tmp_path / "v1" / "index.sqlite3") as db:
            ((other,),) = db.execute("SELECT key FROM entries").fetchall()
        db.close()
    # The copy opens with the old key only.
    context = b"file" + WHO.digest + entry.encode()
    cipher = KeyCipher(lambda: KEY)
    with copy.open("rb") as file:
        key = cipher.open_key(wrapped, key_context(WHO.digest, entry))
        assert len(decrypt(key, file, copy.stat().st_size, context)) > 0
    with pytest.raises(EntryError, match="key"):
        cipher.open_key(other, key_context(WHO.digest, entry))


def test_a_key_that_a_reader_of_the_index_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the reader, and the key is erased as soon as it is gone."""
    monkeypatch.setattr("mixedkv.store.index._BUSY_SECONDS", 9999.0)  # who waits for it waits for hours
    with open_store(tmp_path) as store:
        store.put(WHO, BLOCK, session="a")
        reader = sqlite3.connect(tmp_path / "v1" / "index.sqlite3")
        ((wrapped,),) = reader.execute("SELECT key FROM entries").fetchall()
        reader.execute("BEGIN")
        reader.execute("SELECT COUNT(*) FROM blocks").fetchone()
        assert store.remove(session="a", tenant="secret-tenant") == 1
        assert wrapped in everything(tmp_path)
        assert store.stats().unerased
        reader.close()
        store.put(WHO, BLOCK)
        assert not store.stats().unerased
        assert wrapped not in everything(tmp_path)


def test_a_damaged_wrapped_key_is_a_miss(tmp_path: Path) -> None:
    for value in (b"", bytes(60), b"x"):
        with open_store(tmp_path / str(value)) as store:
            store.put(WHO, BLOCK)
            index = Index(tmp_path / str(value) / "v1" / "index.sqlite3")
            index._db.execute("UPDATE entries SET key = ?", (value,))
            index.close()
            assert store.find(WHO, TOKENS) is None
            assert store.stats().misses == {"key": 1}
            store.put(WHO, BLOCK)
            assert store.read(store.find(WHO, TOKENS)) is not None  # type: ignore[arg-type]


@pytest.mark.parametrize("key", [b"", b"short", "k" * 32, None, bytearray(32)])
def test_a_source_must_give_a_key(tmp_path: Path, key: object) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        KVStore(tmp_path, key=lambda: key)  # type: ignore[arg-type, return-value]
    assert list(tmp_path.iterdir()) == []


def test_a_large_entry(tmp_path: Path) -> None:
    block = make_block(list(range(10_000)), n_layers=3)
    with open_store(tmp_path) as store:
        store.put(WHO, block)
        (read,) = store.read(store.find(WHO, np.arange(10_000))) or []  # type: ignore[arg-type]
    assert same(read, block)
    assert block.nbytes > 3 * 2**20


@pytest.mark.parametrize("key", [OTHER_KEY, None])
def test_a_store_is_not_opened_without_its_key(tmp_path: Path, key: bytes | None) -> None:
    """Plain entries would come to lie beside encrypted ones, and a wrong key would be a count of misses."""
    with open_store(tmp_path) as store:
        store.put(WHO, BLOCK)
    with pytest.raises(ValueError, match=r"encrypted with .*: give"):
        KVStore(tmp_path, key=key and (lambda: key))
    with open_store(tmp_path) as store:
        assert store.find(WHO, TOKENS) is not None


# --- with the key, without, and with another ---


@pytest.mark.parametrize("emptied", [False, True])
@pytest.mark.parametrize("given", [None, OTHER_KEY])
def test_an_encrypted_store_is_opened_with_its_key_only(
    tmp_path: Path, given: bytes | None, emptied: bool
) -> None:
    """Also when nothing is in it: plain text would come to lie beside what is encrypted later."""
    with KVStore(tmp_path, key=lambda: KEY) as store:
        entry = store.put(WHO, BLOCK)
        if emptied:
            store.remove(entry)
    with pytest.raises(ValueError, match="encrypted with"):
        KVStore(tmp_path, key=given and (lambda: given))
    with KVStore(tmp_path, key=lambda: KEY) as store:
        assert (store.find(WHO, TOKENS) is None) == emptied


def test_another_master_key(tmp_path: Path) -> None:
    third = b"t" * 32
    with KVStore(tmp_path, key=lambda: KEY) as store:
        put_chain(store, WHO, TOKENS, [40, 100])
        store.put(WHO, make_block(list(range(64))), session="chat-7")
        old = everything(tmp_path / "v1" / "entries")
    assert rekey(tmp_path, lambda: KEY, lambda: OTHER_KEY) == 3
    assert rekey(tmp_path, lambda: KEY, lambda: OTHER_KEY) == 0  # again, after an interrupt for example
    with pytest.raises(ValueError, match="another key"):
        KVStore(tmp_path, key=lambda: KEY)
    assert rekey(tmp_path, lambda: OTHER_KEY, lambda: third) == 3
    assert everything(tmp_path / "v1" / "entries") == old
    with KVStore(tmp_path, key=lambda: third) as store:
        match = stored_match(store, WHO, TOKENS)
        assert match.n_tokens == 100
        blocks = store.read(match) or []
        assert same(blocks[1], make_block(TOKENS[40:], 40))
        assert store.put(WHO, make_block(TOKENS[:40])) == match.links[0].entry  # found by its hash
        assert store.remove(session="chat-7", tenant="secret-tenant") == 1
        assert not store.verify().damaged


def test_rekeying_needs_the_key(tmp_path: Path) -> None:
    with KVStore(tmp_path, key=lambda: KEY) as store:
        store.put(WHO, BLOCK)
    with pytest.raises(ValueError, match="not encrypted with the old key"):
        rekey(tmp_path, lambda: OTHER_KEY, lambda: b"t" * 32)
    with pytest.raises(ValueError, match="the new key is the old one"):
        rekey(tmp_path, lambda: KEY, lambda: KEY)
    with KVStore(tmp_path, key=lambda: KEY) as store:
        assert store.find(WHO, TOKENS) is not None


def test_who_still_has_the_old_key_destroys_nothing(tmp_path: Path) -> None:
    with KVStore(tmp_path, key=lambda: KEY) as store:
        store.put(WHO, BLOCK)
        rekey(tmp_path, lambda: KEY, lambda: OTHER_KEY)
        assert store.find(WHO, TOKENS) is None
        assert store.stats().misses == {"key": 1}
    with KVStore(tmp_path, key=lambda: OTHER_KEY) as store:
        assert store.find(WHO, TOKENS) is not None


def test_the_old_wrapped_keys_are_gone(tmp_path: Path) -> None:
    with KVStore(tmp_path, key=lambda: KEY) as store:
        store.put(WHO, BLOCK)
    with sqlite3.connect(tmp_path / "v1" / "index.sqlite3") as db:
        ((wrapped,),) = db.execute("SELECT key FROM entries")
    db.close()
    assert wrapped in everything(tmp_path)
    rekey(tmp_path, lambda: KEY, lambda: OTHER_KEY)
    assert wrapped not in everything(tmp_path)


def test_plain_entries_in_a_store_with_a_key_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with KVStore(tmp_path) as store:
        store.put(WHO, BLOCK)
    assert not caplog.records
    for _ in range(2):  # each time, until they are removed
        with KVStore(tmp_path, key=lambda: KEY):
            assert "mixedkv cache rm" in caplog.text
        caplog.clear()
