"""`mixedkv cache`: what is stored, and looking after it, from the command line."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from mixedkv.store import KVStore, key_from_file
from support.servers import prefork
from support.stores.blocks import identity, make_block, put_chain

pytestmark = pytest.mark.full

WHO = identity()
TOKENS = list(range(100))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with KVStore(tmp_path / "kv") as store:
        put_chain(store, WHO, TOKENS, [40, 77])
        store.put(WHO, make_block([7, *TOKENS]), session="chat")
    return tmp_path / "kv"


def cache(*args: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = prefork.run(["cache", *map(str, args)])
    assert done.returncode == code, done.stderr
    return done


def ids(folder: Path) -> list[str]:
    with KVStore(folder) as store:
        return [entry.id for entry in store.entries()]


def test_ls(folder: Path) -> None:
    lines = cache("ls", "--store", folder).stdout.splitlines()
    assert lines[0].split() == ["id", "tokens", "size", "used", "model", "and", "cache"]
    assert [line.split()[0] for line in lines[1:4]] == [entry[:12] for entry in ids(folder)]
    assert {" ".join(line.split()[1:4]) for line in lines[1:4]} == {"0 to 40", "40 to 77", "0 to 101"}
    assert all(line.endswith("a.gguf f16") for line in lines[1:4])
    assert lines[4].startswith("3 entries, ")
    assert max(map(len, lines)) <= 80


def test_rm(folder: Path) -> None:
    assert cache("rm", "--store", folder, "--session", "chat").stdout == "1 entries removed\n"
    last = next(iter(ids(folder)))
    assert cache("rm", "--store", folder, last[:12]).stdout == "1 entries removed\n"
    assert len(ids(folder)) == 1
    assert cache("rm", "--store", folder, "--all").stdout == "1 entries removed\n"
    assert cache("ls", "--store", folder).stdout == "0 entries, 0 B\n"


def test_verify(folder: Path) -> None:
    assert cache("verify", "--store", folder).stdout == "3 entries whole, 0 damaged and removed\n"
    path = sorted(folder.rglob("*.safetensors"), key=lambda path: path.stat().st_size)[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    lines = cache("verify", "--store", folder).stdout.splitlines()
    assert lines[0] == f"{path.name[:12]}  damaged: its checksum does not match"
    assert lines[1] == "2 entries whole, 1 damaged and removed"


def test_gc(folder: Path) -> None:
    (folder / "v1" / "entries" / ("a" * 32 + ".tmp")).write_bytes(b"x")
    (folder / "v1" / "entries" / ("b" * 32 + ".safetensors")).write_bytes(b"x")
    lines = cache("gc", "--store", folder).stdout.splitlines()
    assert lines[0] == "1 unfinished files, 1 files without an entry,"
    assert lines[1] == "0 entries without a file, 0 not used for long, 0 over the size: removed"
    assert lines[2].startswith("3 entries, ")
    assert "0 not used for long" in cache("gc", "--store", folder, "--older-than", "1h").stdout
    time.sleep(0.1)
    assert "3 not used for long" in cache("gc", "--store", folder, "--older-than", "0.1s").stdout


def test_gc_shrinks(folder: Path) -> None:
    done = cache("gc", "--store", folder, "--max-gb", "0", "--eviction", "oldest")
    assert "3 over the size" in done.stdout
    assert "eviction='newest'" in cache("gc", "--store", folder, "--eviction", "newest", code=2).stderr


def test_an_encrypted_store(tmp_path: Path) -> None:
    (tmp_path / "key").write_text((b"k" * 32).hex())
    (tmp_path / "key").chmod(0o600)
    with KVStore(tmp_path / "kv", key=lambda: b"k" * 32) as store:
        store.put(WHO, make_block(TOKENS))
    assert "1 encrypted (*)" in cache("ls", "--store", tmp_path / "kv").stdout
    without = cache("verify", "--store", tmp_path / "kv").stdout
    assert "1 not checked: encrypted with another key, or with none; see --key" in without
    with_key = cache("verify", "--store", tmp_path / "kv", "--key", f"file:{tmp_path / 'key'}").stdout
    assert with_key == "1 entries whole, 0 damaged and removed\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "the following arguments are required: ACTION"),
        (["ls"], "the following arguments are required: --store"),
        (["ls", "--store", "none"], "none holds no store of this version"),
        (["rm", "--store", "{}"], "give ids, --session NAME, --message ID or --all"),
        (["rm", "--store", "{}", "--all", "abc"], "give ids, --session NAME, --message ID or --all"),
        (["rm", "--store", "{}", "xyz"], "'xyz' begins the id of no entries"),
        (["rm", "--store", "{}", ""], "'' begins the id of 3 entries"),
        (["rm", "--store", "{}", "--session", "../x"], "it looks like a path"),
        (["verify", "--store", "{}", "--key", "k"], "use env:NAME or file:PATH"),
        (["verify", "--store", "{}", "--key", "env:NO_SUCH"], "NO_SUCH is not set"),
        (["gc", "--store", "{}", "--max-gb", "-1"], "'-1' is not a size: use"),
    ],
)
def test_bad_input_is_one_line_and_code_2(folder: Path, args: list[str], message: str) -> None:
    done = cache(*(folder if arg == "{}" else arg for arg in args), code=2)
    (line,) = done.stderr.splitlines()
    assert line.startswith("mixedkv: error: ")
    assert message in line
    assert len(ids(folder)) == 3


def test_names_are_found_under_a_new_key(tmp_path: Path) -> None:
    folder, keys = tmp_path / "kv", [tmp_path / "old", tmp_path / "new"]
    for i, path in enumerate(keys):
        path.write_text(f"{i:064x}")
        path.chmod(0o600)
    with KVStore(folder, key=key_from_file(keys[0])) as store:
        store.put(WHO, make_block([7, *TOKENS]), session="chat")
        store.put(WHO, make_block(TOKENS))
        match = store.find(WHO, TOKENS)
        assert match is not None
        store.messages.note(match, [("msg-1", len(TOKENS))])
    old, new = (f"file:{path}" for path in keys)
    cache("rekey", "--store", folder, "--key", old, "--new-key", new)
    named = ["rm", "--store", folder, "--key", new]
    assert cache(*named, "--session", "chat").stdout == "1 entries removed\n"
    assert cache(*named, "--message", "msg-1").stdout == "1 entries removed\n"
    with KVStore(folder, key=key_from_file(keys[1])) as store:
        assert not store.entries()


@pytest.mark.parametrize("name", [("--session", "no-such"), ("--message", "no-such")])
def test_a_deletion_that_finds_nothing_says_so(folder: Path, name: tuple[str, str]) -> None:
    done = cache("rm", "--store", folder, *name, code=2)
    assert "'no-such', so nothing was removed" in done.stderr
    assert len(ids(folder)) == 3


def test_rekey(tmp_path: Path) -> None:
    folder, keys = tmp_path / "kv", [tmp_path / "old", tmp_path / "new"]
    for i, path in enumerate(keys):
        path.write_text(f"{i:064x}")
        path.chmod(0o600)
    with KVStore(folder, key=key_from_file(keys[0])) as store:
        store.put(WHO, make_block(TOKENS))
    old, new = (f"file:{path}" for path in keys)
    told = cache("rekey", "--store", folder, "--key", old, "--new-key", new).stdout
    assert told == "1 entries and 0 sessions have the new key; the old one reads none of them\n"
    with KVStore(folder, key=key_from_file(keys[1])) as store:
        assert store.find(WHO, TOKENS) is not None
    wrong = cache("rekey", "--store", folder, "--key", "env:NOT_THERE", "--new-key", new, code=2)
    assert "NOT_THERE is not set" in wrong.stderr
    assert "give the old key" in cache("rekey", "--store", folder, "--new-key", new, code=2).stderr
