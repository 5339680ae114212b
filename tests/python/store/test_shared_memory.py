"""A `-shm` file that someone cuts short ends no process, and loses nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.patience import PATIENCE

pytestmark = pytest.mark.full

INDEX = """
import os, sys, time
from pathlib import Path
from mixedkv.store.index import Index
path, cut, within = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "within"
one, other = Index(path), Index(path)
def add(index, first, n):
    with index._transaction():
        for i in range(first, first + n):
            index._db.execute("INSERT INTO keys VALUES (?, ?)", (f"key{i}", os.urandom(3000)))
def cut_short():
    os.truncate(f"{path}-shm", cut)
one._db.execute("PRAGMA wal_autocheckpoint = 100000")
add(one, 0, 6000)
size = os.stat(f"{path}-shm").st_size
assert size > 32768
assert other._db.execute("SELECT COUNT(*) FROM keys").fetchone() == (6000,)
n = 6000
if within:
    try:
        with one._transaction():
            one._db.execute("INSERT INTO keys VALUES ('lost', x'00')")
            cut_short()
            one._db.execute("INSERT INTO keys VALUES ('lost too', x'00')")
        sys.exit("a transaction of a file that was cut short was carried out")
    except Exception as error:
        assert "cut short" in str(error), error
else:
    cut_short()
for index in (other, one, other, other, one):
    assert index._db.execute("SELECT COUNT(*) FROM keys").fetchone() == (n,), n
    add(index, n, 1)
    n += 1
assert one._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
assert os.stat(f"{path}-shm").st_size >= size
one.close(); other.close()
again = Index(path)
assert again._db.execute("SELECT COUNT(*) FROM keys").fetchone() == (n,)
print("whole")
"""
SESSIONS = """
import asyncio, os, sys
from mixedkv.sessions.metadata_sqlite import SQLiteMetadata
from mixedkv.sessions.metadata import Key
async def main():
    backend = SQLiteMetadata(sys.argv[1])
    for i in range(20):
        await backend.put(Key("t", f"s{i}"), b"x" * 100, 1e12)
        os.truncate(sys.argv[1] + "-shm", int(sys.argv[2]))
        assert await backend.get(Key("t", f"s{i}")) == b"x" * 100
    assert len(await backend.keys()) == 20
    await backend.close()
asyncio.run(main())
print("whole")
"""


def run(code: str, *args: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "whole"), done.stderr


@pytest.mark.parametrize("cut", [0, 100, 32768])
@pytest.mark.parametrize("when", ["between", "within"])
def test_an_index_goes_on(tmp_path: Path, cut: int, when: str) -> None:
    run(INDEX, str(tmp_path / "index.sqlite3"), str(cut), when)


@pytest.mark.parametrize("cut", [0, 200])
def test_sessions_go_on(tmp_path: Path, cut: int) -> None:
    tmp_path.chmod(0o700)
    run(SESSIONS, str(tmp_path / "sessions.sqlite3"), str(cut))
